"""`foretrain advise` of a fine-tuning run: what to change, each change planned for the user's own run and card."""

import click

from foretrain.advice.record import SCHEMA
from foretrain.app.finetuning.advise import advice, confirmed
from foretrain.app.finetuning.limits import plans
from foretrain.app.limits import Limits
from foretrain.base.errors import UserError
from foretrain.cli.common import print_json
from foretrain.cli.finetune import asked_about, asked_with, card_and_words, read
from foretrain.cli.planning.exact import progress
from foretrain.cli.planning.printing import document, screen
from foretrain.reports.views.finetune import advice as view

LISTED, TRACED = 10, 3  # changes with --full and --json, and those that --exact traces, where --top does not say
# Options that say nothing of a fine-tuning run.
REFUSED = {"trainer": "trainer", "apply": "apply", "write": "apply"}


def answered(context: click.Context, words: list[str]) -> bool:
    """Whether a fine-tuning run was asked about; then it is answered. Raises UserError."""
    asked = asked_about(context, words)
    if asked:
        _answer(context, words)
    return asked


def _answer(context: click.Context, words: list[str]) -> None:
    """Print the changes, in the form that the options of `advise` ask for. Raises UserError."""
    given, top = context.params, context.params["top"]
    gpu, cards = card_and_words(context)
    found = read(context, [*words, *cards], REFUSED)
    base = plans(found, gpu, given["others"], Limits(given["price"]))
    if len(base) > 1:
        raise UserError("usage.one_card_advise", count=len(base))
    changes = advice(base[0], given["goal"])
    if given["exact"]:
        with progress(given["quiet"]) as listen:
            changes = confirmed(changes, base[0], found, top or TRACED, listen)
    shown = changes.top(top or LISTED)
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif given["full"]:
        document(view.document(base[0], shown, len(changes.advised) - len(shown.advised)))
    else:
        asked = asked_with(given, words, "advise")
        screen(view.screen(base[0], changes, asked, top))
