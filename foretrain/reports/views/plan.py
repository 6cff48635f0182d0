"""A plan as a Document: the verdict first, then memory, work, time, what surrounds it, notes."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from foretrain.advice.outlook import Outlook
from foretrain.advice.record import Advices
from foretrain.base.messages import format_value
from foretrain.base.units import Span
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.energy import Prices, Spending
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.spec import StepName
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import NO_TIME
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
from foretrain.reports.views.shared import assumed, card_memory, uncalibrated

if TYPE_CHECKING:
    from foretrain.predict.finetune.plan import FineTunePlan


def document(
    plan: Plan, now: datetime | None = None, advice: Advices | None = None, outlook: Outlook | None = None
) -> Document:
    """The whole plan. `now`: says when the run would end if it were started then. `advice`: what to change. `outlook`:
    what other ways and other cards would give."""
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


LATEST_S = 3e9  # a run of more than a century has no date


def blocks(plan: Plan, now: datetime | None) -> tuple[Block, ...]:
    timing = plan.timing_of(plan.step)
    if timing is None:
        id = "plan.no_time_of_recipe" if plan.of_untimed_recipe else "plan.no_time"
        return (Paragraph(Message(id, {"gpu": plan.gpu.name, "recipe": plan.config.recipe})),)
    rows = _time_rows(plan, timing, now)
    other: StepName = "nanogpt" if plan.step == "foretrain" else "foretrain"
    beside = None if plan.config.eval_only else plan.timing_of(other)
    if beside and timing.source != "measured (log)":
        took = beside.step_s
        id = "row.nanogpt_time" if other == "nanogpt" else "row.foretrain_time"
        rows.append((Message(id), duration(took.low_s, took.expected_s, took.high_s)))
    table = Table((), tuple(rows))
    if timing.source == "estimated":
        return table, Paragraph(uncalibrated(plan))
    return table, Paragraph(Message("source.log" if timing.source.startswith("measured") else "source.calibrated"))


def duration(low: float, expected: float, high: float) -> Message:
    if low == high:
        return Message("value.duration", {"expected": expected})
    return Message("value.duration_range", {"low": low, "expected": expected, "high": high})


def _time_rows(plan: Plan, timing: Timing, now: datetime | None) -> list[tuple[Cell, ...]]:
    total = timing.length_s
    rows = [_evaluation_time_row(plan, timing)] if plan.config.eval_only else _step_rows(plan, timing)
    rows.append((Message("row.total_time"), duration(total.low_s, total.expected_s, total.high_s)))
    if now is not None and total.high_s < LATEST_S:
        ends = {name: now + timedelta(seconds=getattr(total, f"{name}_s")) for name in ("low", "expected", "high")}
        rows.append(
            (Message("row.finish"), Message("value.finish", {k: f"{v:%Y-%m-%d %H:%M}" for k, v in ends.items()}))
        )
    return rows + spending_rows(plan.config, plan.gpu, timing)


def _step_rows(plan: Plan, timing: Timing) -> list[tuple[Cell, ...]]:
    step, evaluation = timing.step_s, timing.evaluation_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), duration(step.low_s, step.expected_s, step.high_s)),
        (Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})),
        (Message("row.mfu"), _mfu(timing, plan.gpu, plan.dtype)),
    ]
    if plan.compiled and plan.work.steps:
        compiling = timing.compile_s or NO_TIME
        first, own = compiling.plus(step), evaluation.expected_s if evaluation else 0.0
        values = {"low": first.low_s, "expected": first.expected_s, "high": first.high_s}
        logged = {"compile": compiling.expected_s, "logged": first.expected_s + own}
        rows.append((Message("row.first_step"), Message("value.first_step", {**values, **logged})))
    if evaluation is not None:
        rows.append(
            (
                Message("row.evaluations"),
                Message(
                    "value.evaluations",
                    {
                        "count": timing.n_evaluations,
                        "each": evaluation.expected_s,
                        "save": timing.save_s.expected_s if timing.save_s else 0.0,
                    },
                ),
            )
        )
    steps = plan.work.steps
    all_steps = duration(step.low_s * steps, step.expected_s * steps, step.high_s * steps)
    rows.append((Message("row.all_steps", {"steps": steps}), all_steps))
    return rows


def spending_rows(prices: RunConfig | Prices, gpu: Gpu, timing: Spending, cards: int = 1) -> list[tuple[Cell, ...]]:
    rows = []
    if timing.power is not None:
        values = {
            "expected": timing.energy_expected_j, "low": timing.energy_low_j, "high": timing.energy_high_j,
            "watts": timing.power.expected_w, "watts_low": timing.power.low_w, "watts_high": timing.power.high_w,
            "board": gpu.board_power_w or 0, "count": cards,
        }  # fmt: skip
        id = "value.energy_cpu" if timing.power.model == "cpu" else "value.energy"
        id = "cluster.energy" if cards > 1 else id
        rows.append((Message("row.energy"), Message(id, values)))
    if timing.cost_expected is not None:
        rows.append(_money_row("electricity", (timing.cost_low, timing.cost_expected, timing.cost_high), prices))
    if timing.rent_expected is not None:
        rows.append(_money_row("rent", (timing.rent_low, timing.rent_expected, timing.rent_high), prices))
    if timing.co2_expected_g is not None:
        values = {"low": timing.co2_low_g, "expected": timing.co2_expected_g, "high": timing.co2_high_g}
        rows.append((Message("row.co2"), Message("value.co2", {**values, "factor": prices.co2_per_kwh})))
    return rows


def _money_row(id: str, amounts: tuple[float | None, ...], prices: RunConfig | Prices) -> tuple[Cell, ...]:
    values = dict(zip(("low", "expected", "high"), amounts, strict=True))
    values |= {"price_kwh": prices.price_per_kwh, "price_hour": prices.price_per_hour}
    return Message(f"row.{id}"), Message(f"value.{id}", {**values, "currency": prices.currency})


def _mfu(timing: Timing, gpu: Gpu, dtype: str) -> Message:
    values = {"mfu": timing.mfu, "nanogpt": timing.nanogpt_mfu, "rate": timing.flop_per_s, "dtype": dtype}
    peak = gpu.peak_flop_per_s(dtype)  # type: ignore[arg-type]
    if timing.mfu is None or peak is None:
        return Message("value.mfu_unknown", values)
    return Message("value.mfu_cpu" if gpu.kind == "cpu" else "value.mfu", {**values, "peak": peak})


def _evaluation_time_row(plan: Plan, timing: Timing) -> tuple[Cell, ...]:
    took = timing.evaluation_s
    assert took is not None
    values = {"batches": plan.evaluation_batches, "low": took.low_s, "expected": took.expected_s, "high": took.high_s}
    return Message("row.evaluation"), Message("value.evaluation_time", values)


def row(items: Iterable[tuple[str, Cell | None, Cell]]) -> Figures:
    """(id, value, source) of each; those that nothing is known of are left out."""
    return Figures(
        tuple(Figure(Message(f"figure.{id}"), value, source) for id, value, source in items if value is not None)
    )


def of_plan(plan: Plan) -> Figures:
    memory, timing = plan.memory_of(plan.step), plan.timing_of(plan.step)
    found = [_ranged("memory_needed", memory.neediest.needed_span, "bytes", memory.source)]
    if plan.available_bytes is not None:
        free = Quantity(plan.available_bytes, "bytes")
        found.append(Figure(Message("figure.available"), free, plan.gpu.name))
    if timing is not None:
        found += _times(plan, timing) + _spent(timing, timing.source, plan.config.currency)
    if plan.work.tokens:
        tokens, source = Quantity(plan.work.tokens, "count"), Message("source_name.config")
        found.append(Figure(Message("figure.tokens"), tokens, source))
    return Figures(tuple(found))


def _times(plan: Plan, timing: Timing) -> list[Figure]:
    run = _ranged("wall", _span(timing.length_s), "duration", timing.source)
    if not plan.work.steps:
        return [run]
    step = _span(timing.step_s)
    found = [
        _ranged("step", step, "duration", timing.source),
        run,
        _ranged("speed", _per_step(timing.tokens_per_s, step), "number", timing.source),
    ]
    if timing.mfu:
        found.append(_ranged("mfu", _per_step(timing.mfu, step), "percent", timing.source))
    return found


def _per_step(value: float, step_s: Span) -> Span:
    low, expected, high = step_s
    return value * expected / high, value, value * expected / low


def of_finetune(plan: "FineTunePlan") -> Figures:
    span = plan.memory.neediest.needed_span
    found = [_ranged("memory_needed", span, "bytes", plan.memory.source)] if plan.bound == "exact" else []
    if plan.available_bytes is not None:
        found.append(Figure(Message("figure.available"), Quantity(plan.available_bytes, "bytes"), plan.gpu.name))
    timing = plan.timing
    if timing is not None:
        step = _span(timing.step_s)
        found.append(_ranged("step", step, "duration", timing.source))
        found.append(_ranged("speed", _per_step(timing.tokens_per_s, step), "number", timing.source))
        if timing.mfu:
            found.append(_ranged("mfu", _per_step(timing.mfu, step), "percent", timing.source))
        if timing.total_s:
            found.append(_ranged("wall", _span(timing.length_s), "duration", timing.source))
            found += _spent(timing, timing.source, timing.prices.currency)
    return Figures(tuple(found))


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
