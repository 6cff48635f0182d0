"""A plan as a Document: the verdict first, then memory, work, time, what surrounds it, notes."""

from collections.abc import Iterable
from datetime import datetime

from foretrain.advice.outlook import Outlook
from foretrain.advice.record import Advices
from foretrain.base.messages import format_value
from foretrain.base.units import Span
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import Spending
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Figure,
    Figures,
    Message,
    Only,
    Paragraph,
    Quantity,
    Section,
    Table,
)
from foretrain.reports.views import memory as memory_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views.advice import section as advice_section
from foretrain.reports.views.shared import assumed, card_memory
from foretrain.reports.views.takes import no_time, speed_source, time_rows


def document(
    plan: Plan, now: datetime | None = None, advice: Advices | None = None, outlook: Outlook | None = None
) -> Document:
    """Return the whole plan. `now`: says when the run would end. `outlook`: what other ways and cards would give."""
    gpu = plan.gpu
    peak = gpu.peak_flop_per_s(plan.dtype)
    logged = plan.timing is not None and plan.timing.source.startswith("measured")
    source = Message("plan.source_logged" if logged else "plan.source_trace" if plan.exact else "plan.source")
    subtitle = Message(
        "plan.subtitle" if peak and gpu.memory_bytes else "plan.subtitle_short",
        {"gpu": gpu.name, "memory": gpu.memory_bytes or 0, "peak": peak or 0, "dtype": plan.dtype, "source": source},
    )
    whose = () if logged or plan.timing is None else (_of_step(plan),)
    pictures = tuple(Only("page", block) for block in _pictures(plan))
    numbers = Only("page", of_plan(plan))
    sections = [
        Section(
            Message("plan.verdict"),
            (*memory_view.sentences(plan), *card_memory(gpu), *assumed(plan), _of_step(plan), numbers),
        ),
        *([advice_section(plan, advice)] if advice is not None else []),
        Section(Message("plan.memory"), (*pictures, *memory_view.tables(plan))),
        Section(Message("plan.bytes"), memory_view.every_byte(plan)),
        Section(Message("plan.work"), (_work(plan),)),
        Section(Message("plan.time"), (*whose, *blocks(plan, now))),
        *(outlook_view.sections(plan, outlook) if outlook is not None else []),
    ]
    if plan.notes:
        notes = tuple(Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes)
        sections.append(Section(Message("plan.notes"), notes))
    return Document(Message("plan.title", {"name": plan.name}), subtitle, sections)


def _pictures(plan: Plan) -> list[Block]:
    blocks: list[Block] = []
    for picture, memory in zip(memory_view.phase_pictures(plan), plan.memories, strict=True):
        blocks += [picture, *(memory_view.verdicts(plan, memory) if memory.step == plan.step else ())]
    return blocks


def _of_step(plan: Plan) -> Only:
    return Only("page", Paragraph(Message("report.figures_of", {"step": Message(f"step.{plan.step}")})))


def _work(plan: Plan) -> Table:
    counts, work = plan.counts, plan.work
    rows: list[tuple[Cell, ...]] = [
        (Message("row.parameters"), Message("value.parameters", counts.model_dump())),
        (Message("row.optimizer_groups"), Message("value.optimizer_groups", counts.model_dump())),
    ]
    if plan.config.eval_only:
        return Table((), (rows[0], _evaluation_work_row(plan)))
    rows += [
        (Message("row.tokens_per_step"), Message("value.tokens_per_step", {
            "tokens": work.tokens_per_step, "batch_size": plan.config.batch_size,
            "accumulation": plan.config.gradient_accumulation_steps, "block_size": plan.config.block_size})),
        (Message("row.tokens"), Message("value.tokens", {"tokens": work.tokens, "steps": work.steps})),
    ]  # fmt: skip
    if work.epochs is not None:
        values = {"epochs": work.epochs, "tokens": work.dataset_tokens}
        rows.append((Message("row.epochs"), Message("value.epochs", values)))
    rows.append((Message("row.flops"), Message("value.flops", {"flops_6n": work.flops_6n, "flops": work.flops})))
    return Table((), tuple(rows))


def _evaluation_work_row(plan: Plan) -> tuple[Cell, ...]:
    c = plan.config.as_nanogpt() if plan.step == "nanogpt" else plan.config
    batches = plan.evaluation_batches
    values = {
        "batches": batches, "batch_size": c.eval_batch, "block_size": c.eval_block,
        "tokens": 2 * c.eval_rows * c.eval_block,
    }  # fmt: skip
    return Message("row.evaluation"), Message("value.evaluation_work", values)


def blocks(plan: Plan, now: datetime | None) -> tuple[Block, ...]:
    timing = plan.timing
    if timing is None:
        return (Paragraph(no_time(plan, "plan")),)
    return Table((), tuple(time_rows(plan, timing, now))), Paragraph(speed_source(plan, timing))


def row(items: Iterable[tuple[str, Cell | None, Cell]]) -> Figures:
    """(id, value, source) of each; those that nothing is known of are left out."""
    return Figures(
        tuple(Figure(Message(f"figure.{id}"), value, source) for id, value, source in items if value is not None)
    )


def of_plan(plan: Plan | FineTunePlan) -> Figures:
    bounded = isinstance(plan, FineTunePlan) and plan.bound != "exact"
    found = [] if bounded else [_ranged("memory_needed", plan.needs.neediest.needed_span, "bytes", plan.needs.source)]
    if plan.available_bytes is not None:
        free = Quantity(plan.available_bytes, "bytes")
        found.append(Figure(Message("figure.available"), free, plan.gpu.name))
    if (timing := plan.timing) is not None:
        found += _times(timing) + (_spent(timing, timing.source, timing.prices.currency) if timing.total_s else [])
    if isinstance(plan, Plan) and plan.work.tokens:
        tokens, source = Quantity(plan.work.tokens, "count"), Message("source_name.config")
        found.append(Figure(Message("figure.tokens"), tokens, source))
    return Figures(tuple(found))


def _times(timing: Timing) -> list[Figure]:
    run = [_ranged("wall", _span(timing.length_s), "duration", timing.source)] if timing.total_s else []
    if timing.steps == 0:
        return run
    step = _span(timing.step_s)
    speed = _ranged("speed", _per_step(timing.tokens_per_s, step), "number", timing.source)
    found = [_ranged("step", step, "duration", timing.source), *run, speed]
    if timing.mfu:
        found.append(_ranged("mfu", _per_step(timing.mfu, step), "percent", timing.source))
    return found


def _per_step(value: float, step_s: Span) -> Span:
    low, expected, high = step_s
    return value * expected / high, value, value * expected / low


def _spent(timing: Spending, source: str, currency: str) -> list[Figure]:
    found = []
    if joules := timing.energy_expected_j:
        span = (timing.energy_low_j or joules, joules, timing.energy_high_j or joules)
        found.append(_ranged("energy", span, "energy", source))
    if money := timing.money():
        low, amount, high = money
        said = Message("value.amount", {"amount": amount, "currency": currency})
        found.append(Figure(Message("figure.cost"), said, source, _ends(low, high, "money")))
    return found


def _ranged(id: str, span: Span, format: str, source: str) -> Figure:
    low, expected, high = span
    return Figure(Message(f"figure.{id}"), Quantity(expected, format), source, _ends(low, high, format))


def _ends(low: float, high: float, format: str) -> Cell:
    ends = {"low": format_value(low, format), "high": format_value(high, format)}
    return Message("value.low_to_high", ends) if ends["low"] != ends["high"] else ""


def _span(range: Range) -> Span:
    return range.low_s, range.expected_s, range.high_s
