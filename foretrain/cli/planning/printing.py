"""How `foretrain plan` prints its answer: a dozen lines, --full, --oneline, or --json."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from click.exceptions import Exit

from foretrain.advice.asked import Asked
from foretrain.advice.cards import compared
from foretrain.advice.finetune import advices
from foretrain.app import kept_answers as kept_advice
from foretrain.app.finetune import searched
from foretrain.app.limits import Limits
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import printable, say
from foretrain.cli.common import ERR, OUT, print_error, print_json, working
from foretrain.config import writer as config_writer
from foretrain.config.options import RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.largest import Largest
from foretrain.predict.plan import SCHEMA, Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.within import Within, within
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Screen
from foretrain.reports.views import first as first_view
from foretrain.reports.views import limits as limits_view
from foretrain.reports.views.lead import lead_of
from foretrain.reports.views.shared import check_error

if TYPE_CHECKING:
    from foretrain.advice.best import Best
    from foretrain.advice.record import Advice
    from foretrain.predict.smallest import SmallestCard
    from foretrain.reports.views import cards as cards_view
    from foretrain.reports.views import cluster as cluster_view
    from foretrain.reports.views import finetune as finetune_view
    from foretrain.reports.views import generation as generation_view
    from foretrain.reports.views import line as line_view
    from foretrain.reports.views import plan as plan_view
else:  # each answer waits for its own view alone
    cards_view, cluster_view, finetune_view, generation_view, line_view, plan_view = (
        Later(f"foretrain.reports.views.{name}")
        for name in ("cards", "cluster", "finetune", "generation", "line", "plan")
    )

WITHIN_SCHEMA = "foretrain.within/1"
BEST_SCHEMA = "foretrain.best/1"
LARGEST_SCHEMA = "foretrain.largest/1"
SMALLEST_SCHEMA = "foretrain.smallest-card/1"
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
    text.render(made, OUT)


def screen(made: Screen) -> None:
    text.render_screen(made, OUT)


def line(message: Message) -> None:
    OUT.print(printable(message.text()), soft_wrap=True, markup=False)


def largest(plan: AnyPlan, found: Largest, form: Form) -> None:
    """Print the largest value of an option that fits."""
    if form.as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
    else:
        document(limits_view.largest(plan, found))


def smallest(plan: AnyPlan, found: "SmallestCard", form: Form) -> None:
    if form.as_json:
        print_json(found.to_json(schema=SMALLEST_SCHEMA))
    else:
        line(line_view.smallest(plan, found))


def plans(found: Sequence[AnyPlan], form: Form, limits: Limits) -> None:
    """Print one plan, or several cards with the best of them: of fine-tuning what fits in a limit on each."""
    if form.oneline:
        for plan in found:
            line(line_view.line(plan))
    elif len(found) == 1:
        one(found[0], form)
    else:
        cards = compared(found, limits.limit() if limits.asks else None)
        if form.as_json:
            objects = [plan.to_json(schema=SCHEMA) for plan in found]
            best = {"best": cards.best.model_dump(mode="json")} if isinstance(found[0], Plan) else {}
            known = cards.to_json() if isinstance(found[0], FineTunePlan) else best
            print_json({"schema": PLANS_SCHEMA, "plans": objects, **known})
        else:
            _shown(cards_view.document(found, cards) if form.full else cards_view.screen(found, cards, form.asked))


def one(plan: AnyPlan, form: Form) -> None:
    """Print one plan of any kind of run, with what to change."""
    brief = not (form.full or form.as_json)
    if isinstance(plan, Plan) and brief:
        screen(first_view.screen(plan, kept_advice.first(plan, form.asked), form.asked))
        return
    changes = _changes(plan) if isinstance(plan, FineTunePlan | InferencePlan) else ()
    if form.as_json:
        advice = kept_advice.short_list(plan) if isinstance(plan, Plan) else None
        if isinstance(plan, FineTunePlan | InferencePlan) and changes:
            advice = advices(plan, changes)
        print_json({**plan.to_json(schema=SCHEMA), "advice": advice.model_dump(mode="json") if advice else None})
    elif isinstance(plan, Plan):
        document(plan_view.document(plan, datetime.now(), kept_advice.short_list(plan)))
    elif isinstance(plan, FineTunePlan):
        _shown(finetune_view.screen(plan, changes, form.asked) if brief else finetune_view.document(plan, changes))
    elif isinstance(plan, ClusterPlan):
        _shown(cluster_view.screen(plan, form.asked) if brief else cluster_view.document(plan))
    else:
        _shown(generation_view.screen(plan, changes, form.asked) if brief else generation_view.document(plan, changes))


def _shown(made: Document | Screen) -> None:
    screen(made) if isinstance(made, Screen) else document(made)


def _changes(plan: FineTunePlan | InferencePlan) -> "tuple[Advice, ...]":
    """What to change. The verdict stands on stderr while it is looked for."""
    verdict, found = lead_of(plan)[0].message.text(), ()
    with working(verdict) as tell:
        for number, each in enumerate(searched(plan), 1):
            found = each
            tell(f"{verdict} {say('working.searching')} ({number})")
    return found


def print_within(plan: AnyPlan, found: Within, form: Form, largest: Largest | None = None) -> None:
    """Print the answer of --within and --tokens. `largest`: with the largest value of an option, as --largest found."""
    if form.as_json:
        print_json({**found.to_json(schema=WITHIN_SCHEMA), **({"largest": largest.to_json()} if largest else {})})
    elif form.oneline:
        line(line_view.line(found.plan, found.steps))
    else:
        assert not isinstance(plan, InferencePlan)
        whole = form.full
        _shown(
            limits_view.within(plan, found, largest) if whole else limits_view.screen(plan, found, form.asked, largest)
        )


def print_best(plan: Plan, found: "Best", form: Form) -> None:
    if form.as_json:
        print_json(found.to_json(schema=BEST_SCHEMA))
        return
    if form.full:
        document(limits_view.best(plan, found))
    elif form.oneline:
        line(line_view.best_line(plan, found))
    else:
        screen(first_view.best(plan, found, form.asked))


def check(plans: Sequence[AnyPlan]) -> None:
    """Exit with 3 where one does not fit, else with 2 where nobody can say; the one object of --json says so too."""
    errors = [error for plan in plans if (error := check_error(plan))]
    for error in sorted(errors, key=lambda error: -error.exit_code)[:1]:
        exit_with(error)


def exit_with(error: UserError) -> NoReturn:
    """Exit with an error beside the answer that is printed already."""
    print_error(error, as_json=False)
    raise Exit(int(error.exit_code))


def write_config(config: RunConfig, path: Path, asked: Asked, before: dict[str, str] | None = None) -> None:
    """The config as a file that `plan` and `train` read: what differs from the defaults, and where it is from."""
    config_writer.write_text(config_writer.short_toml(config, origin(asked), before), path)
    tell_written(path, quiet=asked.quiet)


def origin(asked: Asked) -> tuple[str, ...]:
    """What a written file says of where it is from."""
    command = shlex.join(("foretrain", asked.command, *asked.words, *asked.card_options()))
    return (say("written.origin", command=command, version=version("foretrain")),)


def tell_written(path: Path, *, quiet: bool) -> None:
    if not quiet:
        ERR.print(printable(say("within.written", path=str(path))), soft_wrap=True, markup=False)


def write_steps(plan: Plan | ClusterPlan, found: Within, path: Path, asked: Asked) -> None:
    """The config of a plan with the steps that fit in a limit, as a file."""
    assert not isinstance(found.plan, FineTunePlan)
    before = {name: say("written.was", value=str(getattr(plan.config, name))) for name in found.changed}
    write_config(found.plan.config, path, asked, before)


def answer(request: Any, plan: AnyPlan, limits: Limits, form: Form, largest: Largest | None = None) -> None:
    """Answer the inverse question that was asked. `largest`: what --largest found before."""
    if limits.best:
        assert isinstance(plan, Plan | ClusterPlan)
        with working(say("best.searching", share=0.0), quiet=form.asked.quiet) as show:
            best = kept_advice.best(plan, limits, lambda done, of: show(say("best.searching", share=done / of)))
        if limits.write is not None:
            write_config(best.candidates[0].config, limits.write, form.asked)
        print_best(rank_of(plan) if isinstance(plan, ClusterPlan) else plan, best, form)
        return
    found = within(request.forecast(plan), limits.limit())
    if limits.write is not None:
        assert isinstance(plan, Plan | ClusterPlan)
        write_steps(plan, found, limits.write, form.asked)
    print_within(plan, found, form, largest)
