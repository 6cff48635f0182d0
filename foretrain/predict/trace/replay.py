"""A trace through the allocator: what is allocated and reserved in each phase, and where a limit is hit. No torch."""

from collections.abc import Callable

from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, Block, OutOfMemory
from foretrain.predict.trace.record import Allocation, Trace, moment_id


class PhasePeak(Record):
    """The highest moments of a phase; `position` is the event of the trace at which allocated is highest.

    A phase without events has what was there before it; -1 is before all events.
    """

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    position: int


class Death(Record):
    """The allocation that could not be served under a limit: when, for what, and what was there. Bytes."""

    phase: str
    moment: str
    op: str
    module: str
    position: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int


class Replay(Record):
    """What torch.cuda.memory_stats would say at the end, and phase by phase. `death` under a limit that is hit."""

    phases: tuple[PhasePeak, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int
    death: Death | None = None

    @property
    def survives(self) -> bool:
        return self.death is None


Watcher = Callable[[int, Allocator, Block | None], None]


def replay(
    trace: Trace,
    settings: Settings | None = None,
    limit_bytes: int | None = None,
    *,
    physical: bool = False,
    cap_bytes: int | None = None,
    watch: Watcher = lambda position, allocator, block: None,
) -> Replay:
    """Run a trace's events through the allocator, up to its end or to the first allocation that a limit forbids.

    The limits are those of Allocator. `watch` is called after each event with its position, the allocator, and the
    block that was born or died.
    """
    allocator = Allocator(settings, limit_bytes, physical=physical, cap_bytes=cap_bytes)
    alive: dict[int, Block | None] = {}
    peaks: dict[str, tuple[int, int, int]] = {}
    death: Death | None = None
    for phase, start, end in trace.spans():
        allocator.reset_peak()
        highest, highest_at = allocator.allocated_bytes, start - 1
        for position in range(start, end):
            event = trace.events[position]
            try:
                if event >= 0:
                    block = alive[event] = born(allocator, trace.allocations[event])
                else:
                    block = alive.pop(~event)
                    allocator.free(block)
            except OutOfMemory as error:
                death = _death(trace, position, error)
                break
            if allocator.allocated_bytes > highest:
                highest, highest_at = allocator.allocated_bytes, position
            watch(position, allocator, block)
        if end or phase != "build":  # where the code names its first phase at once there is none before
            before = peaks.get(phase, (-1, 0, -1))
            top, at = (highest, highest_at) if highest > before[0] else (before[0], before[2])
            peaks[phase] = (top, max(before[1], allocator.peak_reserved_bytes), at)
        if death is not None:
            break
    phases = tuple(
        PhasePeak(phase=phase, allocated_bytes=allocated, reserved_bytes=reserved, position=position)
        for phase, (allocated, reserved, position) in peaks.items()
    )
    return Replay(
        phases=phases,
        peak_allocated_bytes=max((peak.allocated_bytes for peak in phases), default=0),
        peak_reserved_bytes=max((peak.reserved_bytes for peak in phases), default=0),
        num_alloc_retries=allocator.num_alloc_retries,
        death=death,
    )


def born(allocator: Allocator, allocation: Allocation) -> Block | None:
    """The block of an allocation on its stream; which others use it matters only when it is freed, so is said now."""
    block = allocator.malloc(allocation.nbytes, allocation.stream)
    for stream in allocation.used_on:
        allocator.record_stream(block, stream)
    return block


def _death(trace: Trace, position: int, error: OutOfMemory) -> Death:
    allocation = trace.allocations[trace.events[position]]
    return Death(
        phase=trace.phase_at(position), moment=moment_id(trace, position), op=allocation.op, module=allocation.module,
        position=position, requested_bytes=error.requested_bytes, allocated_bytes=error.allocated_bytes,
        reserved_bytes=error.reserved_bytes, limit_bytes=error.limit_bytes,
    )  # fmt: skip


def smallest_limit_bytes(trace: Trace, settings: Settings | None = None, *, physical: bool = False) -> int:
    """The least memory under which the trace still runs, to a MiB: between allocated peak and reserved peak."""
    free = replay(trace, settings)
    low, high = max(free.peak_allocated_bytes // 2, 0), -(-free.peak_reserved_bytes // MIB) * MIB
    while high - low > MIB:
        middle = (low + high) // 2 // MIB * MIB
        if middle in (low, high):
            break
        if replay(trace, settings, middle, physical=physical).survives:
            high = middle
        else:
            low = middle
    return high
