"""How `foretrain plan` prints its answer: a dozen lines, --full, --oneline, or --json."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.exceptions import Exit

from foretrain.advice.advisor import short_list
from foretrain.advice.asked import Asked
from foretrain.advice.cards import compared
from foretrain.advice.finetune import advices
from foretrain.advice.first_answer import first_answer
from foretrain.app.job_files import JOB_KINDS, write_job
from foretrain.app.limits import Limits, best_of
from foretrain.base.errors import UserError
from foretrain.base.installation import Later, installed
from foretrain.base.messages import option_help, option_unit, printable, say
from foretrain.cli.common import ERR, OUT, need_one_of, print_error, print_json, working
from foretrain.cli.planning import exact, reading
from foretrain.cli.planning.exact import Depth
from foretrain.config import writer as config_writer
from foretrain.config.options import RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.largest import Largest
from foretrain.predict.plan import SCHEMA, Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.trace import interpreter
from foretrain.predict.within import Within, within
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Screen, Section, Table
from foretrain.reports.views import document_of, lead, screen_of
from foretrain.reports.views.shared import check_error

if TYPE_CHECKING:
    from foretrain.advice.best import Best
    from foretrain.advice.record import Advice
    from foretrain.app import finetune as tuning
    from foretrain.app import training_script as script
    from foretrain.predict.inference.plan import RunnableModels
    from foretrain.predict.largest import SmallestCard
    from foretrain.reports.views import cards as cards_view
    from foretrain.reports.views import first as first_view
    from foretrain.reports.views import generation as generation_view
    from foretrain.reports.views import limits as limits_view
else:  # each answer waits for its own view alone
    cards_view, first_view, generation_view, limits_view = (
        Later(f"foretrain.reports.views.{name}") for name in ("cards", "first", "generation", "limits")
    )
    tuning, script = Later("foretrain.app.finetune"), Later("foretrain.app.training_script")

PLANS_SCHEMA = "foretrain.plan/1#plans"


@dataclass(frozen=True)
class Form:
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
    if form.as_json:
        print_json(found.to_json(schema="foretrain.plan/1#largest"))
    else:
        document(limits_view.largest(plan, found))


def smallest(plan: AnyPlan, found: "SmallestCard", form: Form) -> None:
    if form.as_json:
        print_json(found.to_json(schema="foretrain.plan/1#smallest-card"))
    else:
        line(lead.smallest(plan, found))


def models(found: "RunnableModels", given: dict[str, Any]) -> None:
    """Print which models generate text on a card."""
    if given["as_json"]:
        print_json(found.to_json(schema="foretrain.plan/1#models"))
    else:
        screen(generation_view.models(found, full=given["full"], quiet=given["quiet"]))


def plans(found: Sequence[AnyPlan], form: Form, limits: Limits) -> None:
    """Print one plan, or several cards with the best of them: of fine-tuning what fits in a limit on each."""
    if form.oneline:
        for plan in found:
            line(lead.line(plan))
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
    more: tuple[Any, ...] = ()
    if isinstance(plan, FineTunePlan | InferencePlan):
        more = (_changes(plan),)
    elif isinstance(plan, Plan):
        brief = not (form.full or form.as_json)
        more = (first_answer(plan, form.asked),) if brief else (short_list(plan, plan.step), datetime.now())
    if form.as_json:
        advice = next(iter(more), None)
        if isinstance(plan, FineTunePlan | InferencePlan):
            advice = advices(plan, advice) if advice else None
        print_json({**plan.to_json(schema=SCHEMA), "advice": advice.model_dump(mode="json") if advice else None})
    elif form.full:
        document(document_of(plan, *more))
    else:
        screen(screen_of(plan, form.asked, *more))


def _shown(made: Document | Screen) -> None:
    screen(made) if isinstance(made, Screen) else document(made)


def _changes(plan: FineTunePlan | InferencePlan) -> "tuple[Advice, ...]":
    verdict, found = lead.lead_of(plan)[0].message.text(), ()
    with working(verdict) as tell:
        for number, each in enumerate(tuning.searched(plan), 1):
            found = each
            tell(f"{verdict} {say('working.searching')} ({number})")
    return found


def print_within(plan: AnyPlan, found: Within, form: Form, largest: Largest | None = None) -> None:
    """Print the answer of --within and --tokens. `largest`: with the largest value of an option, as --largest found."""
    if form.as_json:
        beside = {"largest": largest.to_json()} if largest else {}
        print_json({**found.to_json(schema="foretrain.plan/1#within"), **beside})
    elif form.oneline:
        line(lead.line(found.plan, found.steps))
    else:
        assert not isinstance(plan, InferencePlan)
        whole = form.full
        _shown(
            limits_view.within(plan, found, largest) if whole else limits_view.screen(plan, found, form.asked, largest)
        )


def print_best(plan: Plan, found: "Best", form: Form) -> None:
    if form.as_json:
        print_json(found.to_json(schema="foretrain.plan/1#best"))
        return
    if form.full:
        document(limits_view.best(plan, found))
    elif form.oneline:
        line(lead.best_line(plan, found))
    else:
        screen(first_view.best(plan, found, form.asked))


def check(plans: Sequence[AnyPlan]) -> None:
    """Exit with 3 where one does not fit, else with 2 where it is unknown; the object of --json has it too."""
    errors = [error for plan in plans if (error := check_error(plan))]
    for error in sorted(errors, key=lambda error: -error.exit_code)[:1]:
        exit_with(error)


def exit_with(error: UserError) -> NoReturn:
    """Exit with an error beside the answer that is printed already."""
    print_error(error, as_json=False)
    raise Exit(int(error.exit_code))


def write_config(config: RunConfig, path: Path, asked: Asked, before: dict[str, str] | None = None) -> None:
    config_writer.write_text(config_writer.short_toml(config, origin(asked), before), path)
    tell_written(path, quiet=asked.quiet)


def origin(asked: Asked) -> tuple[str, ...]:
    return (say("written.origin", command=command_of(asked), version=installed("foretrain")),)


def command_of(asked: Asked) -> str:
    return shlex.join(("foretrain", asked.command, *asked.words, *asked.card_options()))


def tell_written(path: Path, *, quiet: bool) -> None:
    if not quiet:
        ERR.print(printable(say("within.written", path=str(path))), soft_wrap=True, markup=False)


def write_steps(plan: Plan | ClusterPlan, found: Within, path: Path, asked: Asked) -> None:
    assert not isinstance(found.plan, FineTunePlan)
    before = {name: say("written.was", value=str(getattr(plan.config, name))) for name in found.changed}
    write_config(found.plan.config, path, asked, before)


def within_limits(request: Any, plan: AnyPlan, limits: Limits, form: Form, largest: Largest | None = None) -> None:
    """Answer the inverse question that was asked. `largest`: what --largest found before."""
    if limits.best:
        assert isinstance(plan, Plan | ClusterPlan)
        with working(say("best.searching", share=0.0), quiet=form.asked.quiet) as show:
            best = best_of(plan, limits, lambda done, of: show(say("best.searching", share=done / of)))
        if limits.write is not None:
            write_config(best.candidates[0].config, limits.write, form.asked)
        print_best(rank_of(plan) if isinstance(plan, ClusterPlan) else plan, best, form)
        return
    found = within(request.forecast(plan), limits.limit())
    if limits.write is not None:
        assert isinstance(plan, Plan | ClusterPlan)
        write_steps(plan, found, limits.write, form.asked)
    print_within(plan, found, form, largest)


def answer(context: click.Context, request: Any, words: list[str]) -> None:
    """Print the answer to what the options of `plan` ask for. Raises UserError."""
    given = context.params
    limits = Limits(
        **{name: given[name] for name in ("price", "co2", "within", "tokens", "best", "data_tokens", "write")},
        given=request.given,
    )
    if given["show_config"]:
        show_config_of(request, limits, given["as_json"])
        return
    depth = Depth(**{name: given[name] for name in Depth.__dataclass_fields__})
    form = Form(given["full"], given["oneline"], given["as_json"], reading.asked_of(context, request, words))
    form.check(elsewhere="--explain" if depth.explain else "--largest" if depth.largest and not limits.asks else "")
    exact.check_depth(depth, request.files)
    request.check(limits, look=depth.looks, traced=depth.traces, largest=depth.largest)
    job = given["write_job"]
    if job:
        need_one_of("--write-job", job, tuple(JOB_KINDS))
    with interpreter.use_interpreter(depth.python):
        made = request.plans(limits, given["step_time"], given["logged_mfu"])
        _check_count(
            made, depth, limits, alone=bool(job or given["write_script"]) or (bool(depth.largest) and form.as_json)
        )
        answered, found = _answered(request, made, limits, depth, form)
    if given["write_script"]:
        path = Path(given["write_script"])
        script.write_script(path, made[0], request.asked, words, command_of(form.asked))
        tell_written(path, quiet=depth.quiet)
    if job:
        tell_written(write_job(job, made[0], words), quiet=depth.quiet)
    if given["check"] and found is not None and found.value is None:
        exit_with(UserError("check.largest_nothing", option=depth.largest, name=request.name, gpu=made[0].place))
    if given["check"] and not limits.best:
        check(answered)


def _check_count(plans: list[Any], depth: Depth, limits: Limits, *, alone: bool) -> None:
    """Raise UserError for what can only be asked of one card (`alone`), and for impossible readings."""
    exact.check_readings(depth, [plan.gpu for plan in plans])
    one = depth.looks or depth.smallest_card or alone or (depth.largest and limits.asks)
    if one and len(plans) > 1:
        raise UserError("usage.one_card", count=len(plans))


def _answered(
    request: Any, made: list[Any], limits: Limits, depth: Depth, form: Form
) -> tuple[list[Any], Largest | None]:
    """Print what was asked; return the plans that --check is about, and what --largest found."""
    found = None
    if depth.smallest_card:
        smallest(made[0], exact.smallest(request, made[0], depth), form)
        return [], found
    if depth.largest:
        for plan in made:
            found = exact.searched(request, plan, depth)
            if found.value is None or not limits.asks:
                largest(plan, found, form)
        if found is None or found.value is None or not limits.asks:
            return [], found
        made = [request.with_option(made[0], found.option, found.value)]
    made = exact.deepened(request, made, depth)
    if depth.explain:
        exact.explain_command(request, made[0], depth, as_json=form.as_json)
    elif limits.asks and len(made) == 1:
        within_limits(request, made[0], limits, form, found)
    else:
        plans(made, form, limits)
    return made, found


def show_config_of(request: Any, limits: Limits, as_json: bool) -> None:
    """Print the options of what is asked, as a table or as one JSON object."""
    values, options, sources = request.settings(limits)
    sources = {name: sources.get(name, "default") for name in options}
    if as_json:
        print_json({"schema": "foretrain.plan/1#config", "config": values.model_dump(mode="json"), "sources": sources})
        return
    rows = tuple(
        (
            each.name,
            str(getattr(values, each.name)),
            option_unit(each.unit),
            sources[each.name],
            option_help(each.name, each.help, each.texts),
        )
        for each in options.values()
    )
    columns = tuple(Message(f"column.{name}") for name in ("key", "value", "unit", "source", "help"))
    section = Section(Message("config.knobs"), (Table(columns, rows),))
    text.render(Document(Message("config.title", {"name": request.name}), Message("config.subtitle"), [section]), OUT)
