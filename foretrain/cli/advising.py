"""`foretrain advise` of fine-tuning, of generating text and of several cards: what to change, each change planned."""

from typing import Any

import click

from foretrain.advice.asked import Asked
from foretrain.advice.record import SCHEMA
from foretrain.app.finetuning.advise import confirmed
from foretrain.app.limits import Limits
from foretrain.base.errors import UserError
from foretrain.cli.common import print_json
from foretrain.cli.planning.exact import progress
from foretrain.cli.planning.printing import document, screen
from foretrain.reports.views.cluster import advice as cluster_view
from foretrain.reports.views.finetune import advice as finetune_view

LISTED, TRACED = 10, 3  # changes with --full and --json, and those that --exact traces, where --top does not say


def answer(context: click.Context, request: Any, asked: Asked) -> None:
    """Print the changes, in the form that the options of `advise` ask for. Raises UserError."""
    given = context.params
    plan, *more = request.plans(Limits(given["price"]))
    if more:
        raise UserError("usage.one_card_advise", count=1 + len(more))
    changes = request.advices(plan, given["goal"] or None)
    if given["exact"]:
        with progress(given["quiet"]) as listen:
            changes = confirmed(changes, plan, request.asked, given["top"] or TRACED, listen)
    view, top = cluster_view if request.kind == "cards" else finetune_view, given["top"]
    shown = changes.top(top or LISTED)
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif given["full"]:
        document(view.document(plan, shown, len(changes.advised) - len(shown.advised)))
    else:
        screen(view.screen(plan, changes, asked, top))
