"""What the trace of a fine-tuning run answers: its phases in the ledger's form, and what only a replay says. No torch.

The verdict replays the trace under what the card leaves, as predict/trace/memory.py does for foretrain's own step.
"""

from dataclasses import replace

from foretrain.base.records import Note, Record
from foretrain.base.units import MIB
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.context import Context
from foretrain.predict.allocator.replay import Death, Replay, replay, smallest_limit_bytes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.memory import FineTuneMemory
from foretrain.predict.finetune.simulated import PHASES
from foretrain.predict.memory import PhaseMemory, carried, judged
from foretrain.predict.trace.memory import components, saved_bytes
from foretrain.predict.trace.record import Trace, moment_id

MOMENTS = {"load": "build", "prepare": "build", "save": "save", "merge": "merge"}  # of phases that run no model


class FineTuneTrace(Record):
    """The traced memory of a fine-tuning run. `death` says where it ends under what the card leaves; None: it lives.

    `attention`: the kernels that it took. `versions`: of the packages whose code was traced.
    """

    memory: FineTuneMemory
    # The least that the allocator may reserve for the run to live, to a thousandth; the context is not included.
    smallest_limit_bytes: int
    smallest_limit_expandable_bytes: int  # the same with expandable_segments:True
    death: Death | None
    attention: tuple[str, ...]
    versions: dict[str, str]
    notes: tuple[Note, ...] = ()


def answered(
    trace: Trace,
    gpu: Gpu,
    versions: dict[str, str],
    *,
    available_bytes: int | None,
    settings: Settings | None = None,
) -> FineTuneTrace:
    """The answer of a trace. `available_bytes`: what the process may take, context included; None: nobody knows."""
    context, run = Context.of(gpu), replay(trace, settings)
    peaks = {peak.phase for peak in run.phases}
    phases = tuple(_phase(trace, run, name, context) for name in PHASES if name in peaks)
    death = None
    if available_bytes is not None:
        limits = available_bytes - context.low_bytes, available_bytes - context.expected_bytes
        dies = _death(trace, run, settings, limits[0])
        death = dies or _death(trace, run, settings, limits[1])
        phases = judged(phases, available_bytes, death.phase if death else None, dies is not None, limits)
        phases = carried(phases)
    expandable = replace(settings or Settings(), expandable_segments=True)
    step = max(MIB, run.peak_reserved_bytes // 1000)
    memory = FineTuneMemory(
        phases=tuple(phases), saved_bytes=saved_bytes(trace), source="traced", context=context,
        paged_bytes=trace.facts["paged_bytes"],
    )  # fmt: skip
    return FineTuneTrace(
        memory=memory, death=death,
        smallest_limit_bytes=smallest_limit_bytes(trace, settings, physical=True, step_bytes=step, free=run),
        smallest_limit_expandable_bytes=smallest_limit_bytes(trace, expandable, physical=True, step_bytes=step),
        attention=tuple(trace.facts["attention"]), versions=versions,
        notes=_notes(trace),
    )  # fmt: skip


def _death(trace: Trace, free: Replay, settings: Settings | None, limit_bytes: int) -> Death | None:
    """Where the run ends under a limit; none that is never reached without one (`free`) ends it."""
    if free.peak_reserved_bytes <= limit_bytes:
        return None
    return replay(trace, settings, max(0, limit_bytes), physical=True).death


def _phase(trace: Trace, run: Replay, name: str, context: Context) -> PhaseMemory:
    peak = next(phase for phase in run.phases if phase.phase == name)
    return PhaseMemory(
        phase=name, moment=MOMENTS.get(name) or moment_id(trace, peak.position), allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes, needed_low_bytes=peak.reserved_bytes + context.low_bytes,
        needed_expected_bytes=peak.reserved_bytes + context.expected_bytes,
        needed_high_bytes=peak.reserved_bytes + context.high_bytes,
        components=components(trace.alive_at(peak.position), peak.allocated_bytes, {}),
    )  # fmt: skip


def _notes(trace: Trace) -> tuple[Note, ...]:
    """What the answer leaves out, or takes from elsewhere."""
    found = [Note(id="traced_leaves_out", values={"what": what}) for what in trace.facts["notes"]]
    if paged := trace.facts["paged_bytes"]:
        found.append(Note(id="traced_paged", values={"paged": paged}))
    return tuple(found)
