"""The numbers that people look for first, in a row: how they are put together, and those of a plan."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from foretrain.base.messages import format_value
from foretrain.base.units import Span
from foretrain.predict.energy import Spending
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.speed.time import Range
from foretrain.reports.document import Cell, Figure, Figures, Message, Quantity

if TYPE_CHECKING:
    from foretrain.predict.finetune.plan import FineTunePlan


def row(items: Iterable[tuple[str, Cell | None, Cell]]) -> Figures:
    """(id, value, source) of each; those that nothing is known of are left out."""
    return Figures(
        tuple(Figure(Message(f"figure.{id}"), value, source) for id, value, source in items if value is not None)
    )


def of_plan(plan: Plan) -> Figures:
    """Of the step that is meant, each with its range and its source."""
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
    """What a step's time divides, at its fast and slow end: the slow end is the low one."""
    low, expected, high = step_s
    return value * expected / high, value, value * expected / low


def of_finetune(plan: "FineTunePlan") -> Figures:
    """Those of a fine-tuning plan; of its cost where it is known how many steps there are."""
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
    """The range, where its ends differ as they are shown."""
    ends = {"low": format_value(low, format), "high": format_value(high, format)}
    return Message("value.low_to_high", ends) if ends["low"] != ends["high"] else ""


def _span(range: Range) -> Span:
    return range.low_s, range.expected_s, range.high_s
