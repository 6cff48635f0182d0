"""How `foretrain plan` prints its answer: a dozen lines, --full, --oneline, or --json."""

from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from click.exceptions import Exit

from foretrain.advice.asked import Asked
from foretrain.advice.cards import choose
from foretrain.app.kept import advice as kept_advice
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import printable
from foretrain.cli.common import OUT, print_error, print_json
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import FAILING
from foretrain.predict.plan import SCHEMA, Plan
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Screen
from foretrain.reports.views import first as first_view
from foretrain.reports.views import limits as limits_view
from foretrain.reports.views.shared import check_error

if TYPE_CHECKING:
    from foretrain.advice.best import Best
    from foretrain.predict.within import Within
    from foretrain.reports.views import cards as cards_view
    from foretrain.reports.views import plan as plan_view
else:
    cards_view, plan_view = Later("foretrain.reports.views.cards"), Later("foretrain.reports.views.plan")

WITHIN_SCHEMA = "foretrain.within/1"
BEST_SCHEMA = "foretrain.best/1"
PLANS_SCHEMA = "foretrain.plans/1"


@dataclass(frozen=True)
class Form:
    """What is printed, and what was asked."""

    full: bool
    oneline: bool
    as_json: bool
    asked: Asked

    def check(self, *, elsewhere: str) -> None:
        """That one form was asked for. `elsewhere`: the option whose answer has a form of its own."""
        wanted = [f"--{name}" for name in ("full", "oneline") if getattr(self, name)]
        if len(wanted) > 1 or (wanted == ["--oneline"] and self.as_json):
            raise UserError("usage.two_forms", options=[*wanted, *(["--json"] if self.as_json else [])])
        if self.oneline and elsewhere:
            raise UserError("usage.no_line", option=elsewhere)


def document(made: Document) -> None:
    """The whole answer."""
    text.render(made, OUT)


def screen(made: Screen) -> None:
    """A dozen lines."""
    text.render_screen(made, OUT)


def line(message: Message) -> None:
    """One line, to be pasted."""
    OUT.print(printable(message.text()), soft_wrap=True, markup=False)


def plans(found: list[Plan], form: Form) -> None:
    """One plan, or a table of cards with the best of them."""
    if form.oneline:
        for plan in found:
            line(first_view.line(plan, plan.step, version("foretrain")))
    elif len(found) == 1:
        _one(found[0], form)
    else:
        _cards(found, form)


def _one(plan: Plan, form: Form) -> None:
    if not (form.full or form.as_json):
        screen(first_view.screen(plan, kept_advice.first(plan, form.asked), form.asked))
        return
    advice = kept_advice.short_list(plan)
    if form.as_json:
        print_json({**plan.to_json(schema=SCHEMA), "advice": advice.model_dump(mode="json") if advice else None})
        return
    document(plan_view.document(plan, datetime.now(), advice))


def _cards(found: list[Plan], form: Form) -> None:
    choice = choose(found)
    if form.as_json:
        objects = [p.to_json(schema=SCHEMA) for p in found]
        print_json({"schema": PLANS_SCHEMA, "plans": objects, "best": choice.model_dump(mode="json")})
        return
    if form.full:
        document(cards_view.document(found, choice))
    else:
        screen(first_view.cards(found, choice, form.asked))


def within(plan: Plan, found: "Within", form: Form) -> None:
    """The answer of --within and --tokens."""
    if form.as_json:
        print_json(found.to_json(schema=WITHIN_SCHEMA))
        return
    if form.full:
        document(limits_view.within(plan, found))
    elif form.oneline:
        assert not isinstance(found.plan, FineTunePlan)
        line(first_view.line(plan, plan.step, version("foretrain"), found.plan.timing, found.steps))
    else:
        screen(first_view.within(plan, found, form.asked))


def best(plan: Plan, found: "Best", form: Form) -> None:
    """The answer of --best."""
    if form.as_json:
        print_json(found.to_json(schema=BEST_SCHEMA))
        return
    if form.full:
        document(limits_view.best(plan, found))
    elif form.oneline:
        line(first_view.best_line(plan, found, version("foretrain")))
    else:
        screen(first_view.best(plan, found, form.asked))


def check(plans: list[Plan]) -> None:
    """Exit with 3 when the step that the headline means does not fit; the one object of --json is the plan, which says
    so too."""
    for p in plans:
        if p.verdict in FAILING:
            id = "check.failed_nanogpt" if p.step == "nanogpt" else "check.failed_foretrain"
            error = check_error(id, p, p.memory_of(p.step), p.gpu, first_view.room(p, "short").text())
            print_error(error, as_json=False)
            raise Exit(int(error.exit_code))
