"""`foretrain advise` of fine-tuning, of generating text and of several cards: what to change, each change planned."""

from types import ModuleType
from typing import Any

import click

from foretrain.advice.asked import Asked
from foretrain.advice.finetune import advise
from foretrain.advice.record import SCHEMA, Advices
from foretrain.app.finetuning.advise import advice, confirmed
from foretrain.app.limits import Limits
from foretrain.app.ranks.plan import advices
from foretrain.base.errors import UserError
from foretrain.cli.common import print_json
from foretrain.cli.planning.exact import progress
from foretrain.cli.planning.printing import document, screen
from foretrain.reports.views.cluster import advice as cluster_view
from foretrain.reports.views.finetune import advice as view

LISTED, TRACED = 10, 3  # changes with --full and --json, and those that --exact traces, where --top does not say


def answer(context: click.Context, request: Any, asked: Asked) -> None:
    """Print the changes, in the form that the options of `advise` ask for. Raises UserError."""
    given = context.params
    plan, *more = request.plans(Limits(given["price"]))
    if more:
        raise UserError("usage.one_card_advise", count=1 + len(more))
    if request.kind == "cards":
        _print(context, plan, advices(plan, given["goal"] or None), asked, cluster_view)
        return
    if request.kind == "generation":
        _print(context, plan, advise(plan, given["goal"] or None), asked)
        return
    changes = advice(plan, given["goal"])
    if given["exact"]:
        with progress(given["quiet"]) as listen:
            changes = confirmed(changes, plan, request.asked, given["top"] or TRACED, listen)
    _print(context, plan, changes, asked)


def _print(context: click.Context, plan: Any, changes: Advices, asked: Asked, view: ModuleType = view) -> None:
    given, top = context.params, context.params["top"]
    shown = changes.top(top or LISTED)
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif given["full"]:
        document(view.document(plan, shown, len(changes.advised) - len(shown.advised)))
    else:
        screen(view.screen(plan, changes, asked, top))
