"""The report of a plan as a Document: the verdict, the figures, what to change, then pictures of everything."""

from datetime import datetime

from foretrain.advice.outlook import Outlook
from foretrain.advice.record import Advices
from foretrain.base.messages import format_value
from foretrain.base.units import Span
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.spec import StepName
from foretrain.predict.speed.time import Range
from foretrain.reports.document import Block, Cell, Document, Figure, Figures, Message, Paragraph, Quantity, Section
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views.memory import phase_bars, verdicts


def document(plan: Plan, found: Outlook, now: datetime | None = None, advice: Advices | None = None) -> Document:
    """The plan's own document with pictures, and what surrounds the plan."""
    whole = plan_view.document(plan, now, advice)
    sections = []
    for section in whole.sections:
        if section.title.id == "plan.verdict":
            ordered = sorted(section.blocks, key=lambda block: not _of_step(block, found.step))
            section = Section(section.title, (*ordered, _of(found.step), figures(plan, found.step)))
        elif section.title.id == "plan.memory":
            section = Section(section.title, (*memory_pictures(plan, found.step), *section.blocks))
        elif section.title.id == "plan.time" and plan.timing and plan.timing.source != "measured (log)":
            section = Section(section.title, (_of(plan.step), *section.blocks))  # whichever the figures above are of
        elif section.title.id == "plan.notes":
            continue
        sections.append(section)
    sections += outlook_view.sections(plan, found)
    sections += [section for section in whole.sections if section.title.id == "plan.notes"]
    return Document(Message("report.plan_title", {"name": plan.name}), whole.subtitle, sections)


def _of(step: StepName) -> Paragraph:
    return Paragraph(Message("report.figures_of", {"step": Message(f"step.{step}")}))


def _of_step(block: Block, step: StepName) -> bool:
    """Whether a verdict is of this way to run the step; it comes first."""
    if not isinstance(block, Paragraph):
        return False
    said = block.message.values.get("step")
    return isinstance(said, Message) and said.id == f"step.{step}"


def memory_pictures(plan: Plan, first: StepName) -> tuple[Block, ...]:
    """A bar for each phase, of both ways to run the step, the one that is asked about first."""
    blocks: list[Block] = []
    for memory in sorted(plan.memories, key=lambda memory: memory.step != first):
        mode = Message("mode.compiled" if memory.compiled else "mode.eager")
        head = Message("report.bars_of", {"step": Message(f"step.{memory.step}"), "mode": mode})
        bars = phase_bars(plan, memory)
        blocks += [type(bars)(head, bars.bars, bars.limit_bytes, bars.card_bytes, bars.source)]
        blocks += verdicts(plan, memory) if memory.step == first else ()
    return tuple(blocks)


def figures(plan: Plan, step: StepName) -> Figures:
    """What people look at first, each with its range and its source."""
    memory, timing = plan.memory_of(step), plan.timing_of(step)
    found = [_figure("memory_needed", memory.neediest.needed_span, "bytes", memory.source)]
    if plan.available_bytes is not None:
        free = Quantity(plan.available_bytes, "bytes")
        found.append(Figure(Message("figure.available"), free, plan.gpu.name))
    if timing is not None:
        found += _times(plan, timing) + _spent(plan, timing)
    if plan.work.tokens:
        found.append(Figure(Message("figure.tokens"), Quantity(plan.work.tokens, "count"), "config"))
    return Figures(tuple(found))


def _times(plan: Plan, timing: Timing) -> list[Figure]:
    run = _figure("wall", _span(timing.total_s), "duration", timing.source)
    if not plan.work.steps:
        return [run]
    found = [
        _figure("step", _span(timing.step_s), "duration", timing.source),
        run,
        Figure(Message("figure.speed"), f"{timing.tokens_per_s:,.0f}", timing.source),
    ]
    if timing.mfu:
        found.append(Figure(Message("figure.mfu"), Quantity(timing.mfu, "percent"), timing.source))
    return found


def _spent(plan: Plan, timing: Timing) -> list[Figure]:
    found = []
    if joules := timing.energy_expected_j:
        span = (timing.energy_low_j or joules, joules, timing.energy_high_j or joules)
        found.append(_figure("energy", span, "energy", timing.source))
    if money := timing.money():
        low, amount, high = money
        said = Message("value.amount", {"amount": amount, "currency": plan.config.currency})
        found.append(Figure(Message("figure.cost"), said, timing.source, _ends(low, high, "money")))
    return found


def _figure(id: str, span: Span, format: str, source: str) -> Figure:
    low, expected, high = span
    return Figure(Message(f"figure.{id}"), Quantity(expected, format), source, _ends(low, high, format))


def _ends(low: float, high: float, format: str) -> Cell:
    """The range, where its ends differ as they are shown."""
    ends = {"low": format_value(low, format), "high": format_value(high, format)}
    return Message("value.low_to_high", ends) if ends["low"] != ends["high"] else ""


def _span(range: Range) -> Span:
    return range.low_s, range.expected_s, range.high_s
