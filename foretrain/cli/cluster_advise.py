"""`foretrain advise CONFIG --gpus "2 x RTX 4090"`: advise, print."""

import click

from foretrain.advice.asked import Asked
from foretrain.advice.record import SCHEMA
from foretrain.app.limits import Limits
from foretrain.app.ranks.plan import advices
from foretrain.app.request import CardsRequest
from foretrain.cli.common import print_json
from foretrain.cli.planning.printing import document, screen
from foretrain.reports.views.cluster import advice as view

LISTED = 10  # changes with --full and --json where --top does not say


def answer(context: click.Context, request: CardsRequest, asked: Asked) -> None:
    """Print the changes. Raises UserError."""
    given, top = context.params, context.params["top"]
    (plan,) = request.plans(Limits(given["price"]))
    found = advices(plan, given["goal"] or None)
    shown = found.top(top or LISTED)
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif given["full"]:
        document(view.document(plan, shown, len(found.advised) - len(shown.advised)))
    else:
        screen(view.screen(plan, found, asked, top))
