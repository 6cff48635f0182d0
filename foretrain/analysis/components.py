"""The memory of a run explained: each component, the peak by tensor name, and what nvidia-smi shows."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from foretrain.base.records import Note, Record
from foretrain.base.units import MIB
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, Block
from foretrain.predict.estimate.simulated_run import symbols_of
from foretrain.predict.memory import Context, PhaseMemory, gathered, predict
from foretrain.predict.plan import Plan
from foretrain.predict.spec import StepName
from foretrain.predict.trace.memory import component_id
from foretrain.predict.trace.record import Allocation, Trace, role_of

TIMELINE_POINTS = 400
BECAUSE = {"logits", "activations", "optimizer"}  # components with a sentence of explanation


class Sum(Record):
    id: str
    size_bytes: int
    formula: str
    numbers: str


class TensorGroup(Record):
    """Tensors of one kind that are alive at the peak, of all layers. `where`: '' for a compiled kernel's."""

    component: str
    where: str
    op: str
    shape: str
    dtype: str
    count: int
    size_bytes: int
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


class Explanation(Record):
    step: StepName
    compiled: bool
    source: str
    phase: PhaseMemory
    sums: tuple[Sum, ...]
    tensors: tuple[TensorGroup, ...]
    lines: tuple[Line, ...]
    conclusion: str  # id of a text
    other_mode_bytes: int  # what the other mode (eager or compiled) would allocate, by the estimate
    timeline: tuple[Point, ...]
    because: Note | None = None  # why the largest component is so large; a text `explain.because.ID`


def explain(
    plan: Plan,
    step: StepName,
    trace: Trace | None = None,
    *,
    settings: Settings | None = None,
    observed_bytes: int | None = None,
    process_bytes: int | None = None,
) -> Explanation:
    """Explain a plan's memory; with a trace by tensors' names and over time. The bytes are nvidia-smi's."""
    memory = plan.memory_of(step)
    phase = memory.neediest
    first = plan.memory[0]
    source: LineSource = "traced" if first.source == "traced" else "estimated"
    shown = Shown(phase, first.context, source, plan.used_by_others_bytes)
    on_card = plan.gpu.kind != "cpu"
    lines, conclusion = reconcile(shown, observed_bytes, process_bytes) if on_card else ((), "none")
    symbols = symbols_of(plan.spec(), *_sizes(plan, phase))
    other = predict(replace(plan.spec(step), compiled=not plan.compiled))
    return Explanation(
        step=step, compiled=memory.compiled, source=memory.source, phase=phase, sums=sums(phase, symbols),
        tensors=tensors(trace, phase.phase, plan.config.n_embd, settings) if trace is not None else (), lines=lines,
        conclusion=conclusion, other_mode_bytes=other.worst.allocated_bytes,
        timeline=timeline(trace, settings) if trace is not None else (), because=because(plan, phase),
    )  # fmt: skip


def _sizes(plan: Plan, phase: PhaseMemory) -> tuple[int, int]:
    c = plan.config
    evaluation = phase.phase.startswith("evaluate")
    return (c.eval_batch, c.eval_block) if evaluation else (c.batch_size, c.block_size)


def sums(phase: PhaseMemory, symbols: dict[str, int]) -> tuple[Sum, ...]:
    found = []
    for component in phase.components:
        formula = gathered(component.formula)
        numbers = with_numbers(formula, symbols)
        found.append(Sum(id=component.id, size_bytes=component.size_bytes, formula=formula, numbers=numbers))
    return tuple(found)


def because(plan: Plan, phase: PhaseMemory) -> Note | None:
    sizes: Counter[str] = Counter()
    for component in phase.components:
        sizes[component.id.partition(".")[0]] += component.size_bytes
    if not sizes:
        return None
    (largest, size), c = sizes.most_common(1)[0], plan.config
    tokens = math.prod(_sizes(plan, phase))
    values = {
        "size": size, "tokens": tokens, "vocab_size": c.vocab_size, "n_layer": c.n_layer,
        "each": size / tokens, "params": plan.counts.n_params,
    }  # fmt: skip
    return Note(id=largest, values=values) if largest in BECAUSE else None


def with_numbers(formula: str, symbols: dict[str, int]) -> str:
    """Turn '12 × 8·B·T·C' into '12 × 8 × 16 × 512 × 384'. Unknown symbols stay."""
    numbered = re.sub(r"[A-Za-z]+", lambda m: f"{symbols[m[0]]:,}" if m[0] in symbols else m[0], formula)
    return numbered.replace("·", " × ")


Kind = tuple[str, str, str, str, str, str]


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
        TensorGroup(
            component=k[0], where=k[1], op=k[2], shape=k[3], dtype=k[4], role=k[5], count=groups[k], size_bytes=size
        )
        for k, size in sizes.most_common()
        if size
    )


def _kind(a: Allocation) -> tuple[str, str, str, str, str]:
    where = re.sub(r"\.\d+\b", ".*", a.name or a.module)
    kernel = re.sub(r"_\d+$", "", a.op)  # Inductor numbers its kernels
    op = "" if a.category in ("weights", "gradients", "optimizer", "batch") else kernel
    return component_id(a), where, op, "×".join(str(side) for side in a.shape), a.dtype


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
