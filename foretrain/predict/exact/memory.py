"""The trace's answer in the ledger's form: phases, components, needs, and a verdict by replay at the limit.

Allocated is what the simulated allocator counts; reserved is its replay without a limit; the verdict replays the
trace under what the card leaves. Where pad_mm's choice can only be measured on the card, both traces are replayed:
the need is a range over both and the verdict is that of the worse one.
"""

from collections import Counter
from collections.abc import Sequence

from foretrain.predict.allocator_settings import Settings
from foretrain.predict.exact.record import Allocation, Trace
from foretrain.predict.exact.replay import Death, Replay, replay, smallest_limit_bytes
from foretrain.predict.memory import (
    CONTEXT_EXPECTED_BYTES,
    CONTEXT_HIGH_BYTES,
    CONTEXT_LOW_BYTES,
    PHASES,
    Component,
    PhaseMemory,
    StepMemory,
    Verdict,
)
from foretrain.records import Record
from foretrain.units import MIB

MARGIN_BYTES = 200 * MIB  # what "fits" leaves to spare beside the expected context


class Exact(Record):
    """One way to run the step, traced: memory in the ledger's form and what only a replay can say."""

    memory: StepMemory
    smallest_limit_bytes: int  # the least that the allocator may reserve for the run to live, context not included
    death: Death | None  # where the run ends under what the card leaves; None where it lives
    torch: str
    pads_unknown: bool  # pad_mm's choice decides between two answers; both are in the range


def phase_of(name: str) -> str:
    """Saving belongs to the phase in which nothing new is allocated; it stands for itself."""
    return name


def components(trace: Trace, alive: Sequence[Allocation], allocated_bytes: int) -> tuple[Component, ...]:
    """Rows of what is alive, largest first, with how many tensors of what each is; the rest is rounding.

    They add up to what the allocator counts: `rounding` is what 512-byte rounding and unsplit remainders add.
    """
    rows: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    for allocation in alive:
        sizes[allocation.category] += allocation.nbytes
        rows.setdefault(allocation.category, Counter())[describe(allocation)] += allocation.nbytes
    found = [
        Component(id=id, size_bytes=size, formula=", ".join(name for name, _ in rows[id].most_common(3)))
        for id, size in sizes.most_common()
        if size
    ]
    rest = allocated_bytes - sum(sizes.values())
    if rest > 0:
        found.append(Component(id="rounding", size_bytes=rest, formula=""))
    return tuple(found)


def describe(allocation: Allocation) -> str:
    """A tensor in a few words: its name or op, its shape and dtype."""
    shape = "×".join(str(side) for side in allocation.shape)
    return f"{allocation.op} {shape} {allocation.dtype}".strip() if shape else allocation.op


def _phase(trace: Trace, run: Replay, name: str, others: Sequence[Replay]) -> PhaseMemory:
    peak = next(phase for phase in run.phases if phase.phase == name)
    reserved = [phase.reserved_bytes for r in others for phase in r.phases if phase.phase == name]
    return PhaseMemory(
        phase=name,
        moment=trace.moment_at(peak.position),
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        needed_low_bytes=min(reserved) + CONTEXT_LOW_BYTES,
        needed_expected_bytes=peak.reserved_bytes + CONTEXT_EXPECTED_BYTES,
        needed_high_bytes=max(reserved) + CONTEXT_HIGH_BYTES,
        components=components(trace, trace.alive_at(peak.position), peak.allocated_bytes),
    )


def exact(
    traces: Sequence[Trace],
    ledger: StepMemory,
    *,
    available_bytes: int | None,
    settings: Settings | None = None,
    capped: bool = False,
) -> Exact:
    """The answer of one trace, or of two that differ in pad_mm's choice.

    `ledger`: gives the phases that are not traced (resume). `available_bytes`: what the process may take, context
    included. `capped`: it is a cap that the trainer sets, not what the card has left.
    """
    runs = [replay(trace, settings) for trace in traces]
    worst = max(range(len(traces)), key=lambda i: runs[i].peak_reserved_bytes)
    trace, run = traces[worst], runs[worst]
    names = {peak.phase for peak in run.phases}
    phases = [_phase(trace, run, name, runs) for name in PHASES if name in names]
    phases += [phase for phase in ledger.phases if phase.phase == "resume"]
    death = None
    if available_bytes is not None:
        ends = {
            context: [_ends(t, available_bytes - context, settings, capped) for t in traces]
            for context in (CONTEXT_LOW_BYTES, CONTEXT_EXPECTED_BYTES + MARGIN_BYTES)
        }
        lenient, strict = ends.values()
        dies = [end for end in lenient if end is not None]
        risks = [end for end in strict if end is not None]
        death = dies[0] if dies else risks[0] if risks else None
        phases = [_judged(phase, available_bytes, len(dies) == len(traces), death) for phase in phases]
    memory = StepMemory(
        step=ledger.step, compiled=ledger.compiled, phases=tuple(phases), saved_bytes=_saved_bytes(trace),
        source="predicted (trace)",
    )  # fmt: skip
    return Exact(
        memory=memory,
        smallest_limit_bytes=max(smallest_limit_bytes(t, settings, physical=not capped) for t in traces),
        death=death,
        torch=trace.facts.get("torch", ""),
        pads_unknown=len(traces) > 1,
    )


def _ends(trace: Trace, limit_bytes: int, settings: Settings | None, capped: bool) -> Death | None:
    return replay(trace, settings, max(0, limit_bytes), physical=not capped).death


def _judged(phase: PhaseMemory, available_bytes: int, certain: bool, death: Death | None) -> PhaseMemory:
    """A phase's verdict: the one in which the run ends has that of the run, later ones by their own tensors."""
    verdict: Verdict = "fits"
    end: Verdict = "does_not_fit" if certain else "tight"
    if death is not None and phase.phase == death.phase:
        verdict = end
    elif phase.allocated_bytes + CONTEXT_LOW_BYTES > available_bytes:
        verdict = "does_not_fit"
    elif phase.allocated_bytes + CONTEXT_EXPECTED_BYTES + MARGIN_BYTES > available_bytes:
        verdict = "tight"
    return phase.model_copy(update={"verdict": verdict})


def _saved_bytes(trace: Trace) -> int:
    """What autograd keeps of one micro-batch: forward tensors alive when the first backward pass begins."""
    start = next((mark.position for mark in trace.moments if mark.name == "backward"), None)
    if start is None:
        return 0
    kinds = ("activations", "logits", "weight_copies", "batch")
    return sum(a.nbytes for a in trace.alive_at(start - 1) if a.category in kinds)
