"""The trace's answer in the estimate's form: phases, components, needs, and a verdict by replay under the card's limit.
Of several traces, where only the card can tell, the need is their range and the verdict that of the worst one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretrain.base.records import Record
from foretrain.hardware.devices import Context
from foretrain.predict.abstract.modules import KINDS
from foretrain.predict.allocator.replay import MemoryFailure, Replay, Tried, replay, smallest_limit_bytes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.estimate.simulated_run import EARLY_GRADIENTS
from foretrain.predict.memory import PHASES, Component, PhaseMemory, RunMemory, judged
from foretrain.predict.trace.record import Allocation, Trace, moment_id

Formulas = Mapping[str, tuple[str, int]]  # of components: (formula, bytes)


class Exact(Record):
    memory: RunMemory
    smallest_limit_bytes: int  # for the allocator, without running out of memory; context not included
    smallest_limit_expandable_bytes: int  # the same with expandable_segments:True
    failure: MemoryFailure | None  # where the run runs out of memory under what the card leaves
    torch: str
    pads_unknown: bool  # pad_mm's choice decides between two answers, both in the range


def components(alive: Sequence[Allocation], allocated_bytes: int, formulas: Formulas) -> tuple[Component, ...]:
    """Return rows of what is alive, largest first, with the estimate's ids; `rounding` is what 512-byte rounding and
    unsplit remainders add. `formulas`: (formula, bytes) of the estimate at the same moment; used where it agrees to
    1%."""
    sizes: Counter[str] = Counter()
    for allocation in alive:
        sizes[component_id(allocation)] += allocation.nbytes
    found = []
    for id, size in sizes.most_common():
        formula, expected = formulas.get(id, ("", 0))
        agrees = abs(expected - size) <= max(0.01 * size, 64 * 1024)
        if size:
            found.append(Component(id=id, size_bytes=size, formula=formula if agrees else ""))
    rest = allocated_bytes - sum(sizes.values())
    if rest > 0:
        found.append(Component(id="rounding", size_bytes=rest, formula=""))
    return tuple(found)


def component_id(allocation: Allocation) -> str:
    """Return the estimate's component; activations are distinguished by the module that made them, where one did."""
    if allocation.category != "activations" or not allocation.module:
        return allocation.category
    last = allocation.module.rsplit(".", 1)[-1]
    if allocation.op == "native_dropout" and (last != "attn" or allocation.dtype == "bool"):
        return "activations.dropout" if allocation.dtype == "bool" else "activations.residual"
    if allocation.module == "chunked_loss":
        return EARLY_GRADIENTS
    if last.isdigit() or "." not in allocation.module:
        return "activations.residual" if last.isdigit() else "activations"
    return f"activations.{KINDS[last]}" if last in KINDS else "activations"


def _formulas(estimate: RunMemory, phase: str) -> Formulas:
    """Return (formula, bytes) of a phase's components; "activations" are one, as compiled kernels have no module."""
    rows = {c.id: (c.formula, c.size_bytes) for p in estimate.phases if p.phase == phase for c in p.components}
    activations = [row for id, row in rows.items() if id.startswith("activations")]
    rows["activations"] = (" + ".join(formula for formula, _ in activations), sum(size for _, size in activations))
    return rows


def phase_of(trace: Trace, runs: Sequence[Replay], name: str, context: Context, formulas: Formulas) -> PhaseMemory:
    """Return a phase as the trace's own replay has it, the first of `runs`; the others widen the range."""
    peak = next(phase for phase in runs[0].phases if phase.phase == name)
    reserved = [phase.reserved_bytes for run in runs for phase in run.phases if phase.phase == name]
    return PhaseMemory(
        phase=name,
        moment=moment_id(trace, peak.position),
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        needed_low_bytes=min(reserved) + context.low_bytes,
        needed_expected_bytes=peak.reserved_bytes + context.expected_bytes,
        needed_high_bytes=max(reserved) + context.high_bytes,
        components=components(trace.alive_at(peak.position), peak.allocated_bytes, formulas),
    )


def replayed(
    traces: Sequence[Trace],
    estimate: RunMemory,
    tried: Sequence[Tried],
    available_bytes: int | None,
    order: Sequence[str] = PHASES,
) -> tuple[RunMemory, MemoryFailure | None, list[Replay]]:
    """Return the memory, where the run ends under its limit, replays with room; `estimate`: of the others."""
    runs = [_with_room(each) for each in tried]
    worst = max(range(len(traces)), key=lambda i: (runs[i].peak_reserved_bytes, runs[i].peak_allocated_bytes))
    trace, run = traces[worst], runs[worst]
    names = {peak.phase for peak in run.phases}
    ordered = [run, *runs]
    phases = [
        phase_of(trace, ordered, name, estimate.context, _formulas(estimate, name)) for name in order if name in names
    ]
    phases += [phase for phase in estimate.phases if phase.phase == "resume"]
    failure = None
    if available_bytes is not None:
        limits = available_bytes - estimate.context.low_bytes, available_bytes - estimate.context.expected_bytes
        ends = [[end_of(each, limit, run) for each, run in zip(tried, runs, strict=True)] for limit in limits]
        failures, risks = ([end for end in each if end is not None] for each in ends)
        failure = failures[0] if failures else risks[0] if risks else None
        # A run that runs out of memory while the model is built reaches no phase of the table.
        dead = None if failure is None else failure.phase if failure.phase in order else phases[0].phase
        phases = judged(phases, available_bytes, dead, len(failures) == len(traces), limits)
    memory = RunMemory(
        step=estimate.step, compiled=estimate.compiled, phases=tuple(phases), saved_bytes=saved_bytes(trace),
        source="traced", context=estimate.context, obstacle=estimate.obstacle,
    )  # fmt: skip
    return memory, failure, runs


def exact(
    traces: Sequence[Trace],
    estimate: RunMemory,
    *,
    available_bytes: int | None,
    settings: Settings | None = None,
    capped: bool = False,
    device_bytes: int | None = None,
) -> Exact:
    """Answer from one trace, or from those that differ in what only the card can tell. `available_bytes`: context
    included; `capped`: by the trainer; `device_bytes`: the whole card's, for per_process_memory_fraction."""
    # The trainer's own call of set_per_process_memory_fraction overrides the setting.
    cap_bytes = None if capped or device_bytes is None else (settings or Settings()).cap_bytes(device_bytes)
    tried = [Tried(trace, settings, physical=not capped, cap_bytes=cap_bytes) for trace in traces]
    memory, failure, runs = replayed(traces, estimate, tried, available_bytes)
    plain, expandable = cap_bytes is None, replace(settings or Settings(), expandable_segments=True)
    limits = [
        smallest_limit_bytes(t, settings, physical=not capped, free=r if plain else None, tried=each if plain else None)
        for t, r, each in zip(traces, runs, tried, strict=True)
    ]
    return Exact(
        memory=memory, failure=failure, torch=traces[0].facts.get("torch", ""), smallest_limit_bytes=max(limits),
        smallest_limit_expandable_bytes=max(
            smallest_limit_bytes(trace, expandable, physical=not capped) for trace in traces
        ),
        pads_unknown=len({each.facts.get("pads") for each in traces}) > 1,
    )  # fmt: skip


def answer(question: dict[str, Any], traces: Sequence[Trace], settings: Settings | None = None) -> Exact:
    """Answer from whole traces, as plain values ask for it (forecast.py, Question.as_json)."""
    return exact(
        traces, RunMemory.model_validate(question["ledger"]), available_bytes=question["available_bytes"],
        settings=settings or Settings.parse(question["settings"]), capped=question["capped"],
        device_bytes=question["device_bytes"],
    )  # fmt: skip


def _with_room(tried: Tried) -> Replay:
    """Replay under no limit but the cap, from which garbage collection counts; where that is too small, under none."""
    run = replay(tried.lifetimes, tried.settings, cap_bytes=tried.cap_bytes)
    return run if run.survives else replay(tried.lifetimes, tried.settings)


def end_of(tried: Tried, limit_bytes: int, run: Replay) -> MemoryFailure | None:
    """Return where it ends under a limit. `run`: its replay with room; the driver refuses nothing below its reserve."""
    if tried.physical and tried.cap_bytes is None and run.peak_reserved_bytes <= limit_bytes:
        return None
    return tried.failure(max(0, limit_bytes))


def saved_bytes(trace: Trace) -> int:
    """Return what autograd saves of one micro-batch: forward tensors alive when the first backward pass begins."""
    start = next((mark.position for mark in trace.moments if mark.name == "backward"), None)
    if start is None:
        return 0
    kinds = ("activations", "logits", "weight_copies", "batch")
    alive = trace.alive_at(start - 1)
    return sum(a.nbytes for a in alive if a.category in kinds and component_id(a) != EARLY_GRADIENTS)
