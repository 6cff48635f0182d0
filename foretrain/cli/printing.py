"""How `foretrain plan` prints its answer: a dozen lines, --full, --oneline, or --json."""

import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from click.exceptions import Exit

from foretrain.advice.advisor import short_list
from foretrain.advice.asked import Asked
from foretrain.advice.cards import compared
from foretrain.advice.finetune import advices
from foretrain.advice.first_answer import first_answer
from foretrain.app.limits import Limits
from foretrain.app.request import Request
from foretrain.base.errors import UserError
from foretrain.base.installation import Later, installed
from foretrain.base.messages import option_help, option_unit, printable, say
from foretrain.base.records import Record
from foretrain.cli.common import ERR, OUT, print_error, print_json, working
from foretrain.config import writer as config_writer
from foretrain.config.options import RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.largest import Largest, SmallestCard
from foretrain.predict.plan import SCHEMA, Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.within import Within
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Screen, Section, Table
from foretrain.reports.views import document_of, lead, screen_of
from foretrain.reports.views.shared import check_error

if TYPE_CHECKING:
    from foretrain.advice.best import Best
    from foretrain.advice.record import Advice
    from foretrain.app import finetune as tuning
    from foretrain.predict.inference.plan import RunnableModels
    from foretrain.reports.views import cards as cards_view
    from foretrain.reports.views import first as first_view
    from foretrain.reports.views import generation as generation_view
    from foretrain.reports.views import limits as limits_view
else:  # each answer waits for its own view alone
    cards_view, first_view, generation_view, limits_view = (
        Later(f"foretrain.reports.views.{name}") for name in ("cards", "first", "generation", "limits")
    )
    tuning = Later("foretrain.app.finetune")

PLANS_SCHEMA = "foretrain.plan/1#plans"


class Form(Protocol):
    @property
    def full(self) -> bool: ...
    @property
    def oneline(self) -> bool: ...
    @property
    def as_json(self) -> bool: ...


def document(made: Document) -> None:
    text.render(made, OUT)


def screen(made: Screen) -> None:
    text.render_screen(made, OUT)


def line(message: Message) -> None:
    OUT.print(printable(message.text()), soft_wrap=True, markup=False)


def show(
    options: Form,
    found: Record,
    schema: str,
    full: Callable[[], Document] | None = None,
    screened: Callable[[], Screen] | None = None,
    lined: Callable[[], Message] | None = None,
    **beside: Any,
) -> None:
    """Print a record in the form that was asked for, of those that it has."""
    if options.as_json:
        print_json({**found.to_json(schema=schema), **beside})
    elif lined and (options.oneline or not full):
        line(lined())
    elif full and (options.full or not screened):
        document(full())
    elif screened:
        screen(screened())


def largest(plan: AnyPlan, found: Largest, options: Form) -> None:
    show(options, found, "foretrain.plan/1#largest", lambda: limits_view.largest(plan, found))


def smallest(plan: AnyPlan, found: SmallestCard, options: Form) -> None:
    show(options, found, "foretrain.plan/1#smallest-card", lined=lambda: lead.smallest(plan, found))


def explanation(found: Record, plan: AnyPlan, options: Form) -> None:
    show(options, found, "foretrain.plan/1#explanation", lambda: document_of(found, plan))


def within(plan: AnyPlan, found: Within, options: Form, asked: Asked, largest: Largest | None = None) -> None:
    """Print the answer of --within and --tokens. `largest`: with the largest value of an option, as --largest found."""
    assert not isinstance(plan, InferencePlan)
    show(
        options,
        found,
        "foretrain.plan/1#within",
        lambda: limits_view.within(plan, found, largest),
        lambda: limits_view.screen(plan, found, asked, largest),
        lambda: lead.line(found.plan, found.steps),
        **({"largest": largest.to_json()} if largest else {}),
    )


def best(plan: Plan, found: "Best", options: Form, asked: Asked) -> None:
    show(
        options,
        found,
        "foretrain.plan/1#best",
        lambda: limits_view.best(plan, found),
        lambda: first_view.best(plan, found, asked),
        lambda: lead.best_line(plan, found),
    )


def models(found: "RunnableModels", given: dict[str, Any]) -> None:
    """Print which models generate text on a card."""
    if given["as_json"]:
        print_json(found.to_json(schema="foretrain.plan/1#models"))
    else:
        screen(generation_view.models(found, full=given["full"], quiet=given["quiet"]))


def plans(found: Sequence[AnyPlan], options: Form, limits: Limits, asked: Asked) -> None:
    """Print one plan, or several cards with the best of them: of fine-tuning what fits in a limit on each."""
    if options.oneline:
        for plan in found:
            line(lead.line(plan))
    elif len(found) == 1:
        one(found[0], options, asked)
    else:
        cards = compared(found, limits.limit() if limits.asks else None)
        if options.as_json:
            objects = [plan.to_json(schema=SCHEMA) for plan in found]
            best = {"best": cards.best.model_dump(mode="json")} if isinstance(found[0], Plan) else {}
            known = cards.to_json() if isinstance(found[0], FineTunePlan) else best
            print_json({"schema": PLANS_SCHEMA, "plans": objects, **known})
        elif options.full:
            document(cards_view.document(found, cards))
        else:
            screen(cards_view.screen(found, cards, asked))


def one(plan: AnyPlan, options: Form, asked: Asked) -> None:
    """Print one plan of any kind of run, with what to change."""
    more: tuple[Any, ...] = ()
    if isinstance(plan, FineTunePlan | InferencePlan):
        more = (_changes(plan),)
    elif isinstance(plan, Plan):
        brief = not (options.full or options.as_json)
        more = (first_answer(plan, asked),) if brief else (short_list(plan, plan.step), datetime.now())
    if options.as_json:
        advice = next(iter(more), None)
        if isinstance(plan, FineTunePlan | InferencePlan):
            advice = advices(plan, advice) if advice else None
        print_json({**plan.to_json(schema=SCHEMA), "advice": advice.model_dump(mode="json") if advice else None})
    elif options.full:
        document(document_of(plan, *more))
    else:
        screen(screen_of(plan, asked, *more))


def _changes(plan: FineTunePlan | InferencePlan) -> "tuple[Advice, ...]":
    verdict, found = lead.lead_of(plan)[0].message.text(), ()
    with working(verdict) as tell:
        for number, each in enumerate(tuning.searched(plan), 1):
            found = each
            tell(f"{verdict} {say('working.searching')} ({number})")
    return found


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


def write_steps(plan: AnyPlan, found: Within, path: Path, asked: Asked) -> None:
    assert isinstance(plan, Plan | ClusterPlan)
    assert isinstance(found.plan, Plan | ClusterPlan)
    before = {name: say("written.was", value=str(getattr(plan.config, name))) for name in found.changed}
    write_config(found.plan.config, path, asked, before)


def show_config(request: Request, limits: Limits, as_json: bool) -> None:
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
