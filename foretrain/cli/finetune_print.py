"""How a plan of a fine-tuning run is printed: a dozen lines, --full, --oneline, or --json."""

from importlib.metadata import version
from typing import Any

from foretrain.advice.cards import FineTuneCards
from foretrain.advice.record import Advice
from foretrain.app.finetune import searched
from foretrain.base.messages import say
from foretrain.cli.common import print_json, working
from foretrain.cli.planning.exact import LARGEST_SCHEMA
from foretrain.cli.planning.printing import WITHIN_SCHEMA, Form, document, line, screen
from foretrain.predict.finetune.plan import SCHEMA, FineTunePlan
from foretrain.predict.largest import Largest
from foretrain.predict.within import Within
from foretrain.reports.views.finetune import cards as cards_view
from foretrain.reports.views.finetune import limits as limits_view
from foretrain.reports.views.finetune import screen as screen_view
from foretrain.reports.views.finetune import whole as whole_view

PLANS_SCHEMA = "foretrain.finetunes/1"
WITHINS_SCHEMA = "foretrain.finetune-withins/1"


def one(plan: FineTunePlan, form: Form) -> None:
    """One plan."""
    if form.oneline:
        line(screen_view.line(plan, version("foretrain")))
        return
    changes = _changes(plan)
    if form.as_json:
        print_json({**plan.to_json(schema=SCHEMA), "changes": [change.model_dump(mode="json") for change in changes]})
    elif form.full:
        document(whole_view.document(plan, changes))
    else:
        screen(screen_view.screen(plan, changes, form.asked))


def _changes(plan: FineTunePlan) -> tuple[Advice, ...]:
    """What to change. The verdict stands on stderr while it is looked for."""
    verdict, found = screen_view.verdict_of(plan).message.text(), list[tuple[Advice, ...]]([()])
    with working(verdict) as tell:
        for each in searched(plan):
            found.append(each)
            tell(f"{verdict} {say('working.searching')} ({len(found) - 1})")
    return found[-1]


def cards(plans: list[FineTunePlan], found: FineTuneCards, form: Form) -> None:
    """Several cards: what each takes, and the best of them."""
    if form.as_json:
        if found.of == "limit":
            print_json(found.to_json(schema=WITHINS_SCHEMA))
            return
        objects = [plan.to_json(schema=SCHEMA) for plan in plans]
        print_json({"schema": PLANS_SCHEMA, "plans": objects, **found.to_json()})
    elif form.oneline:
        for plan in plans:
            line(screen_view.line(plan, version("foretrain")))
    elif form.full:
        document(cards_view.document(plans, found))
    else:
        screen(cards_view.screen(plans, found, form.asked))


def within(found: Within, form: Form, searched: Largest | None = None) -> None:
    """What fits in a limit; `searched`: with the largest value of an option, which --largest has found."""
    if form.as_json:
        extra: dict[str, Any] = {"largest": searched.to_json() if searched else None}
        print_json({**found.to_json(schema=WITHIN_SCHEMA), **extra})
    elif form.oneline:
        assert isinstance(found.plan, FineTunePlan)
        line(screen_view.line(found.plan, version("foretrain"), found.steps))
    elif form.full:
        document(limits_view.document(found, searched))
    else:
        screen(limits_view.screen(found, form.asked, searched))


def largest(plan: FineTunePlan, found: Largest, form: Form) -> None:
    """The largest value of an option that fits."""
    if form.as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
    else:
        line(limits_view.largest(plan, found))
