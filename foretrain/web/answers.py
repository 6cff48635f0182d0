"""What the page draws, as JSON: documents with their texts made, and the numbers of pictures. No engine in here."""

from collections.abc import Callable
from typing import Any

from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import format_value, printable, say, source_name
from foretrain.base.units import Span
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.memory import StepMemory
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.speed.time import Range
from foretrain.reports.document import (
    Block,
    Document,
    Lines,
    Message,
    Pairs,
    Paragraph,
    Section,
    StackedBars,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.reports.numbers import behind
from foretrain.reports.palette import COLOURS, LINES_DARK, LINES_LIGHT, SERIES_COLOURS
from foretrain.reports.views import plan as plan_view

SCHEMA = "foretrain.page/1"


OfBlock = Callable[[Block], dict[str, Any]]


def error_json(error: UserError) -> dict[str, Any]:
    """An error as the command line's --json has it, with the knob of each problem."""
    problems = error.problems if isinstance(error, ConfigError) else [error]
    listed = [{"id": p.id, "message": printable(str(p)), "key": str(p.values.get("key", ""))} for p in problems]
    return {"schema": "foretrain.error/1", "id": error.id, "message": printable(str(error)), "problems": listed}


def document_json(document: Document, of_block: OfBlock | None = None) -> dict[str, Any]:
    """A document with every text made. `of_block`: another way than `block_json` to make a block."""
    return {
        "title": printable(document.title.text()), "subtitle": printable(document.subtitle.text()),
        "sections": [section_json(section, of_block) for section in document.sections],
    }  # fmt: skip


def section_json(section: Section, of_block: OfBlock | None = None) -> dict[str, Any]:
    """A section: its title and its blocks."""
    return {"title": section.title.text(), "blocks": [(of_block or block_json)(block) for block in section.blocks]}


def block_json(block: Block) -> dict[str, Any]:
    """A block with its texts made; of a picture that only the report draws, its numbers."""
    match block:
        case Paragraph(message=message, tone=tone):
            return {"kind": "paragraph", "text": printable(message.text()), "tone": tone}
        case Verbatim(text=text):
            return {"kind": "verbatim", "text": printable(text)}
        case Table():
            rows = [[printable(cell_text(cell)) for cell in row] for row in block.rows]
            columns = [cell_text(cell) for cell in block.columns]
            tones = list(block.tones) or ["plain"] * len(rows)
            return {"kind": "table", "columns": columns, "rows": rows, "numeric": sorted(block.numeric), "tones": tones}
        case StackedBars():
            bars = [{"label": cell_text(bar.label), "parts": dict(bar.parts)} for bar in block.bars]
            return {"kind": "bars", "title": block.title.text(), "bars": bars, "marks": _mark(block.limit_bytes)}
        case Lines():
            series = [{"label": cell_text(s.label), "x": list(s.xs), "y": list(s.ys)} for s in block.series]
            axes = {"x": block.x_label.text(), "y": block.y_label.text()}
            return {"kind": "lines", "title": block.title.text(), "series": series, **axes}
        case Pairs():
            pairs = [[cell_text(label), predicted, measured] for label, predicted, measured in block.rows]
            shown = [[label, *(format_value(value, block.format) for value in both)] for label, *both in pairs]
            return {"kind": "pairs", "title": block.title.text(), "format": block.format, "rows": pairs, "shown": shown}
        case _:  # a picture that only the report draws
            return block_json(behind(block))


def _mark(limit_bytes: int | None) -> list[dict[str, Any]]:
    return [{"value": limit_bytes, "label": say("axis.limit")}] if limit_bytes is not None else []


def legend() -> dict[str, Any]:
    """Names and colours of the groups of memory, and the colours of lines."""
    groups = {group: {"label": say(f"group.{group}"), "colour": colour} for group, colour in COLOURS.items()}
    lines = {"light": list(LINES_LIGHT), "dark": list(LINES_DARK)}  # as in reports and comparisons
    return {"groups": groups, "series": list(SERIES_COLOURS), "lines": lines}


def plan_json(plan: Plan, found: ResolvedConfig) -> dict[str, Any]:
    """A plan as the page shows it: verdicts, key figures, the memory bars of every phase, and the whole document."""
    document = plan_view.document(plan)
    verdict, *rest = document_json(document)["sections"]
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


def _memory(plan: Plan) -> dict[str, Any]:
    """For each way to run the step a bar a phase, and the lines that they must not cross. Bytes."""
    marks = []
    if plan.available_bytes is not None:
        marks.append({"value": plan.available_bytes, "label": say("axis.limit"), "kind": "usable"})
    if plan.gpu.memory_bytes is not None and plan.gpu.memory_bytes != plan.available_bytes:
        marks.append({"value": plan.gpu.memory_bytes, "label": say("page.whole_memory"), "kind": "card"})
    return {"steps": [_step(plan, memory) for memory in sorted(plan.memories, key=plan.memory.index)], "marks": marks}


def _step(plan: Plan, memory: StepMemory) -> dict[str, Any]:
    mode = Message("mode.compiled" if memory.compiled else "mode.eager")
    title = say("plan.step_mode", step=say(f"step.{memory.step}"), mode=mode.text())
    phases, verdict = [], plan.verdict_of(memory.step)
    for phase in memory.phases:
        parts = dict(plan_view.phase_parts(plan, memory, phase))
        span = format_value((phase.needed_low_bytes, phase.needed_high_bytes), "bytes_range")
        phases.append(
            {
                "label": say(f"phase.{phase.phase}"), "parts": parts, "needed": phase.needed_expected_bytes,
                "text": format_value(phase.needed_expected_bytes, "bytes"), "range": span,
                "verdict": say(f"word.{phase.verdict}") if phase.verdict else "–",
                "tone": plan_view.TONES[phase.verdict],
            }
        )  # fmt: skip
    return {"step": memory.step, "title": title, "source": source_name(memory.source), "bars": phases,
            "tone": plan_view.TONES[verdict], "verdict": say(f"word.{verdict}") if verdict else ""}  # fmt: skip
