"""The memory of a phase taken apart: each component, the peak by tensor name, over time, and what nvidia-smi shows."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, Block
from foretrain.predict.memory import Context, PhaseMemory, gathered
from foretrain.predict.trace.memory import component_id
from foretrain.predict.trace.record import Allocation, Trace, role_of

TIMELINE_POINTS = 400


class Sum(Record):
    id: str
    size_bytes: int
    formula: str
    numbers: str


class TensorGroup(Record):
    """Tensors of one kind that are alive at a phase's peak, of all layers. `where`: their weights, or the module that
    made them, '' for a compiled kernel's. `what`: a shape and dtype by a trace, a formula by an estimate."""

    component: str
    where: str
    what: str
    count: int
    size_bytes: int
    numbers: str = ""
    op: str = ""
    role: str = "activation"


LineSource = Literal["estimated", "traced", "published", "calibrated", "observed", "left over"]


class Line(Record):
    id: str
    low_bytes: int
    high_bytes: int
    source: LineSource


class Point(Record):
    position: int
    phase: str
    moment: str
    allocated_bytes: int
    reserved_bytes: int
    by_component_bytes: dict[str, int]


def sums(phase: PhaseMemory, symbols: dict[str, int]) -> tuple[Sum, ...]:
    found = []
    for component in phase.components:
        formula = gathered(component.formula)
        numbers = with_numbers(formula, symbols)
        found.append(Sum(id=component.id, size_bytes=component.size_bytes, formula=formula, numbers=numbers))
    return tuple(found)


def with_numbers(formula: str, symbols: dict[str, int]) -> str:
    """Turn '12 × 8·B·T·C' into '12 × 8 × 16 × 512 × 384'. Unknown symbols stay."""
    numbered = re.sub(r"[A-Za-z]+", lambda m: f"{symbols[m[0]]:,}" if m[0] in symbols else m[0], formula)
    return numbered.replace("·", " × ")


Kind = tuple[str, str, str, str, str]


def tensors(trace: Trace, phase: str, n_embd: int, settings: Settings | None = None) -> tuple[TensorGroup, ...]:
    peak = next(p for p in replay(trace, settings).phases if p.phase == phase)
    groups: Counter[Kind] = Counter()
    sizes: Counter[Kind] = Counter()
    for allocation in trace.alive_at(peak.position):
        forward = trace.moment_at(allocation.allocated_at) == "forward"
        key = (*_kind(allocation), role_of(allocation, component_id(allocation), n_embd, forward=forward))
        groups[key] += 1
        sizes[key] += allocation.nbytes
    return tuple(
        TensorGroup(component=k[0], where=k[1], op=k[2], what=k[3], role=k[4], count=groups[k], size_bytes=size)
        for k, size in sizes.most_common()
        if size
    )


def _kind(a: Allocation) -> tuple[str, str, str, str]:
    where = re.sub(r"\.\d+\b", ".*", a.name or a.module)
    kernel = re.sub(r"_\d+$", "", a.op)  # Inductor numbers its kernels
    op = "" if a.category in ("weights", "gradients", "optimizer", "batch") else kernel
    return component_id(a), where, op, f"{'×'.join(str(side) for side in a.shape)} {a.dtype}"


@dataclass(frozen=True)
class Shown:
    """The basis of nvidia-smi's lines. `others_bytes`: used by other programs, where known."""

    phase: PhaseMemory
    context: Context
    source: LineSource
    others_bytes: int


def reconcile(shown: Shown, observed_bytes: int | None, process_bytes: int | None) -> tuple[tuple[Line, ...], str]:
    """Return (lines from the program's allocations to the card's total, id of the conclusion). Without an observation
    they end in nvidia-smi's expected figure; with one, the rest is left over."""
    phase, context, source = shown.phase, shown.context, shown.source
    allocated = phase.allocated_bytes
    reserved_low = phase.needed_low_bytes - context.low_bytes
    reserved_high = phase.needed_high_bytes - context.high_bytes
    lines = [
        Line(id="allocated", low_bytes=allocated, high_bytes=allocated, source=source),
        Line(
            id="slack", low_bytes=max(0, reserved_low - allocated), high_bytes=reserved_high - allocated, source=source
        ),
    ]
    process_source = "observed"
    if process_bytes is None and observed_bytes is not None and shown.others_bytes:
        process_bytes, process_source = max(0, observed_bytes - shown.others_bytes), "left over"
    conclusion = "none"
    if process_bytes is None:
        low, high = context.low_bytes, context.high_bytes
        lines.append(Line(id="context", low_bytes=low, high_bytes=high, source=context.source))
        low, high = phase.needed_low_bytes, phase.needed_high_bytes
        lines.append(Line(id="process", low_bytes=low, high_bytes=high, source=source))
        if observed_bytes is not None:
            left = (max(0, observed_bytes - high), max(0, observed_bytes - low))
            lines.append(Line(id="others", low_bytes=left[0], high_bytes=left[1], source="left over"))
            conclusion = "below" if observed_bytes < low else "no_process"
    else:
        low, high = process_bytes - reserved_high, process_bytes - reserved_low
        lines.append(Line(id="context_left", low_bytes=low, high_bytes=high, source="left over"))
        lines.append(Line(id="process", low_bytes=process_bytes, high_bytes=process_bytes, source=process_source))
        if observed_bytes is not None:
            rest = observed_bytes - process_bytes
            lines.append(Line(id="others", low_bytes=rest, high_bytes=rest, source="left over"))
        conclusion = _judge(low, high, context)
    if observed_bytes is not None:
        lines.append(Line(id="card", low_bytes=observed_bytes, high_bytes=observed_bytes, source="observed"))
    elif shown.others_bytes and process_bytes is None:
        held = shown.others_bytes
        lines.append(Line(id="others", low_bytes=held, high_bytes=held, source="observed"))
        low, high = phase.needed_low_bytes + held, phase.needed_high_bytes + held
        lines.append(Line(id="card", low_bytes=low, high_bytes=high, source=source))
    return tuple(lines), conclusion


def _judge(low: int, high: int, context: Context) -> str:
    if high < context.low_bytes - 64 * MIB:
        return "too_little"
    if low > context.high_bytes + 64 * MIB:
        return "too_much"
    return "explained"


def timeline(trace: Trace, settings: Settings | None = None, points: int = TIMELINE_POINTS) -> tuple[Point, ...]:
    stretch = max(1, -(-len(trace.events) // points))
    ids = [component_id(a) for a in trace.allocations]
    alive: Counter[str] = Counter()
    best: dict[int, Point] = {}

    def watch(position: int, allocator: Allocator, block: Block | None) -> None:
        if block is None:  # the cache is emptied before this event
            return
        event = trace.events[position]
        id, size = (event, 1) if event >= 0 else (~event, -1)
        alive[ids[id]] += size * trace.allocations[id].nbytes
        index = position // stretch
        if index not in best or allocator.allocated_bytes > best[index].allocated_bytes:
            best[index] = Point(
                position=position, phase=trace.phase_at(position), moment=trace.moment_at(position),
                allocated_bytes=allocator.allocated_bytes, reserved_bytes=allocator.reserved_bytes,
                by_component_bytes={key: value for key, value in alive.items() if value},
            )  # fmt: skip

    replay(trace, settings, watch=watch)
    return tuple(best[index] for index in sorted(best))
