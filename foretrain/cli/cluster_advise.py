"""`foretrain advise CONFIG --gpus "2 x RTX 4090"`: parse, plan, advise, print."""

import click

from foretrain.advice.record import SCHEMA
from foretrain.app.limits import Limits
from foretrain.app.ranks.plan import advices, answer
from foretrain.cli.asked_elsewhere import cards_of
from foretrain.cli.cluster import asked_of, check_options
from foretrain.cli.common import print_json, print_notes
from foretrain.cli.planning.printing import document, screen
from foretrain.config.resolve import resolve
from foretrain.reports.views.cluster import advice as view

ALONE = ("exact", "apply", "write")  # options of `advise` that advice for several cards cannot have
LISTED = 10  # changes with --full and --json where --top does not say


def answer_command(context: click.Context, words: list[str]) -> None:
    """Answer what was asked of several cards that train together. Raises UserError."""
    given, top = context.params, context.params["top"]
    check_options(context, ALONE)
    resolved = resolve(words)
    print_notes(resolved.notes, quiet=given["quiet"])
    plan = answer(resolved, cards_of(given), Limits(given["price"]))
    found = advices(plan, given["goal"] or None)
    shown = found.top(top or LISTED)
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif given["full"]:
        document(view.document(plan, shown, len(found.advised) - len(shown.advised)))
    else:
        screen(view.screen(plan, found, asked_of(context, words, "advise"), top))
