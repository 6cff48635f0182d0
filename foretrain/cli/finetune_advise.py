"""`foretrain advise` of a fine-tuning run: what to change, each change planned for the user's own run and card."""

import click

from foretrain.advice.asked import Asked
from foretrain.advice.record import SCHEMA
from foretrain.app.finetuning.advise import advice, confirmed
from foretrain.app.finetuning.request import FineTuningRequest
from foretrain.app.limits import Limits
from foretrain.base.errors import UserError
from foretrain.cli.common import print_json
from foretrain.cli.planning.exact import progress
from foretrain.cli.planning.printing import document, screen
from foretrain.reports.views.finetune import advice as view

LISTED, TRACED = 10, 3  # changes with --full and --json, and those that --exact traces, where --top does not say


def answer(context: click.Context, request: FineTuningRequest, asked: Asked) -> None:
    """Print the changes, in the form that the options of `advise` ask for. Raises UserError."""
    given, top = context.params, context.params["top"]
    base = request.plans(Limits(given["price"]))
    if len(base) > 1:
        raise UserError("usage.one_card_advise", count=len(base))
    changes = advice(base[0], given["goal"])
    if given["exact"]:
        with progress(given["quiet"]) as listen:
            changes = confirmed(changes, base[0], request.asked, top or TRACED, listen)
    shown = changes.top(top or LISTED)
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif given["full"]:
        document(view.document(base[0], shown, len(changes.advised) - len(shown.advised)))
    else:
        screen(view.screen(base[0], changes, asked, top))
