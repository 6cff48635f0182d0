"""What the page draws, as JSON: documents with their texts made, and the numbers of pictures. No engine in here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import format_value, printable, say, source_name
from foretrain.base.units import Span
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.memory import StepMemory
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.speed.time import Range
from foretrain.reports.as_json import block_json, document_json, drawing
from foretrain.reports.document import Message
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views.memory import TONES, phase_bars

__all__ = ["SCHEMA", "document_json", "drawing", "error_json", "plan_json"]

SCHEMA = "foretrain.page/1"


def error_json(error: UserError) -> dict[str, Any]:
    """An error as the command line's --json has it, with the knob of each problem."""
    problems = error.problems if isinstance(error, ConfigError) else [error]
    listed = [{"id": p.id, "message": printable(str(p)), "key": str(p.values.get("key", ""))} for p in problems]
    return {"schema": "foretrain.error/1", "id": error.id, "message": printable(str(error)), "problems": listed}


def plan_json(plan: Plan, found: ResolvedConfig) -> dict[str, Any]:
    """A plan as the page shows it: verdicts, key figures, the memory bars of every phase, and the whole document."""
    document = plan_view.document(plan)
    verdict, *rest = document_json(document, "terminal")["sections"]  # pictures and figures are beside them
    return {
        "schema": SCHEMA, "title": printable(document.title.text()), "subtitle": document.subtitle.text(),
        "verdict": verdict["blocks"], "figures": _figures(plan), "memory": _memory(plan), "sections": rest,
        "exact": bool(plan.exact), "config": plan.config.model_dump(mode="json"),
        "sources": found.sources, "notes": [printable(str(note)) for note in found.notes],
    }  # fmt: skip


def _figures(plan: Plan) -> list[dict[str, str]]:
    """The numbers that people look at first, each with its range and its source."""
    memory = plan.memory_of(plan.step)
    figures = [_figure("memory", memory.neediest.needed_span, _in("bytes"), memory.source)]
    timing = plan.timing_of(plan.step)
    if timing is None:
        return figures
    run = _figure("run", _span(timing.total_s), _in("duration"), timing.source)
    if plan.config.eval_only:
        return [*figures, run, *_spending(plan, timing)]
    step = _span(timing.step_s)
    figures += [
        _figure("step", step, _in("duration"), timing.source),
        run,
        _figure("speed", _per_step(timing.tokens_per_s, step), _throughput, timing.source),
    ]
    if timing.mfu is not None:
        figures.append(_figure("mfu", _per_step(timing.mfu, step), _in("percent"), timing.source))
    return figures + _spending(plan, timing)


def _span(range: Range) -> Span:
    return range.low_s, range.expected_s, range.high_s


def _per_step(value: float, step: Span) -> Span:
    """What a step's time divides, at its fast and slow end: the slow end is the low one."""
    low, expected, high = step
    return value * expected / high, value, value * expected / low


def _spending(plan: Plan, timing: Timing) -> list[dict[str, str]]:
    found = []
    if timing.power is not None:
        expected = timing.energy_expected_j or 0
        joules = (timing.energy_low_j or expected, expected, timing.energy_high_j or expected)
        found.append(_figure("energy", joules, _in("energy"), timing.source))
    money = timing.money()
    if money is not None:
        found.append(_figure("cost", money, _money_in(plan.config.currency), timing.source))
    return found


def _figure(id: str, span: Span, show: Callable[[float], str], source: str) -> dict[str, str]:
    """A tile: its value, and the range where its ends differ as they are shown."""
    low, value, high = map(show, span)
    ends = say("value.low_to_high", low=low, high=high) if low != high else ""
    return {"id": id, "label": say(f"page.figure.{id}"), "value": value, "range": ends, "source": source_name(source)}


def _in(format: str) -> Callable[[float], str]:
    return lambda value: format_value(value, format)


def _money_in(currency: str) -> Callable[[float], str]:
    return lambda amount: say("value.amount", amount=amount, currency=currency)


def _throughput(tokens_per_s: float) -> str:
    return say("value.throughput", tokens_per_s=tokens_per_s)


def _memory(plan: Plan) -> list[dict[str, Any]]:
    """For each way to run the step a picture with a bar a phase, and a line that stays in sight."""
    memories = sorted(plan.memories, key=plan.memory.index)
    most = max(phase.needed_expected_bytes for memory in memories for phase in memory.phases)
    whole = 1.06 * max(most, plan.available_bytes or 0)
    return [
        {"step": memory.step, "picture": _phases(plan, memory, most), "strip": _strip(plan, memory, whole)}
        for memory in memories
    ]


def _phases(plan: Plan, memory: StepMemory, most: int) -> dict[str, Any]:
    title = Message("page.memory_title", {"step": _mode(memory), "source": memory.source})
    return block_json(replace(phase_bars(plan, memory), title=title, scale_bytes=most, source=None))


def _strip(plan: Plan, memory: StepMemory, whole: float) -> dict[str, Any]:
    """The phase that needs most as a bar of so much of `whole`, beside what is free; shares of one."""
    needed, free, verdict = memory.neediest.needed_expected_bytes, plan.available_bytes, plan.verdict_of(memory.step)
    values = {"step": _mode(memory), "needed": needed, "usable": free or 0}
    values |= {"verdict": Message(f"word.{verdict}")} if verdict else {}
    text = Message("page.strip" if free is not None and verdict else "page.strip_unknown", values).text()
    limit = None if free is None else free / whole
    return {"text": text, "tone": TONES[verdict], "share": needed / whole, "limit": limit}


def _mode(memory: StepMemory) -> Message:
    mode = Message("mode.compiled" if memory.compiled else "mode.eager")
    return Message("plan.step_mode", {"step": Message(f"step.{memory.step}"), "mode": mode})
