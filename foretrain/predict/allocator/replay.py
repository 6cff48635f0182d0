"""A list of events through the allocator: its statistics, phase by phase, and the memory after each event.

Events are plain tuples of three, as Event names them: a trace has tens of thousands of them.
Standard library only.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from foretrain.predict.allocator.blocks import Block
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory

Watcher = Callable[[int, Allocator, Block | None], None]


class Event(NamedTuple):
    """("alloc", id, bytes), ("free", id, 0), ("phase", its name, 0) or ("empty_cache", None, 0).

    ("stream", a number, 0): what follows is allocated on that stream; at first it is the default stream, 0.
    ("record_stream", id, stream): that stream uses it, too, as Tensor.record_stream says.

    An id may come again after it was freed. A phase lasts to the next one and may come again.
    """

    kind: str
    id: Hashable = None
    nbytes: int = 0


class PhasePeak(NamedTuple):
    """The most that was allocated and reserved in a phase, in bytes; what was there at its beginning counts."""

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """How a replay went.

    `stats` are those of torch.cuda.memory_stats over all events. `phases` are in the order in which they first came;
    events before the first one are of the phase "". `allocated_bytes` and `reserved_bytes` have an entry for each event
    if a curve was asked for. `out_of_memory` is what ended the replay, at event `ended_at`.
    """

    stats: dict[str, int]
    phases: tuple[PhasePeak, ...]
    allocated_bytes: list[int]
    reserved_bytes: list[int]
    out_of_memory: OutOfMemory | None
    ended_at: int | None
    allocator: Allocator


class _Peaks:
    """The allocator's peaks, cut at the phases."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.phase, self.started_at = "", 0
        self.phases: dict[str, tuple[int, int]] = {}
        self.whole = (0, 0, 0)

    def begin(self, phase: str, position: int) -> None:
        """The phase before ends here; one without events leaves no trace."""
        a = self.allocator
        now = (a.peak_allocated_bytes, a.peak_reserved_bytes, a.peak_requested_bytes)
        self.whole = (max(self.whole[0], now[0]), max(self.whole[1], now[1]), max(self.whole[2], now[2]))
        if position > self.started_at:
            before = self.phases.get(self.phase, (0, 0))
            self.phases[self.phase] = (max(before[0], now[0]), max(before[1], now[1]))
        a.reset_peak()
        self.phase, self.started_at = phase, position + 1

    def finish(self, position: int) -> tuple[PhasePeak, ...]:
        """Close the last phase and give the allocator its peaks of the whole back."""
        self.begin("", position)
        a = self.allocator
        a.peak_allocated_bytes, a.peak_reserved_bytes, a.peak_requested_bytes = self.whole
        return tuple(PhasePeak(name, *peaks) for name, peaks in self.phases.items())


def replay(
    events: Iterable[tuple[str, Hashable, int]],
    settings: Settings | None = None,
    limit_bytes: int | None = None,
    *,
    physical: bool = False,
    curve: bool = False,
    watch: Watcher | None = None,
) -> Replay:
    """Run events (see Event) up to their end, or to the first request that the limit forbids.

    `limit_bytes` and `physical` are those of Allocator. `watch` is called after each event with its position, the
    allocator, and the block that was allocated or freed. Raises ValueError for an event that makes no sense: an unknown
    kind, an id that is allocated twice or freed without being allocated.
    """
    allocator = Allocator(settings, limit_bytes, physical=physical)
    peaks = _Peaks(allocator)
    alive: dict[Hashable, Block | None] = {}
    allocated_curve: list[int] = []
    reserved_curve: list[int] = []
    out_of_memory, position, stream = None, -1, 0
    for position, (kind, id, nbytes) in enumerate(events):
        block = None
        if kind == "alloc":
            if id in alive:
                raise ValueError(f"event {position} allocates {id!r}, which is alive")
            try:
                block = alive[id] = allocator.malloc(nbytes, stream)
            except OutOfMemory as error:
                out_of_memory = error
                break
        elif kind == "free":
            if id not in alive:
                raise ValueError(f"event {position} frees {id!r}, which is not alive")
            block = alive.pop(id)
            allocator.free(block)
        elif kind == "stream":
            if not isinstance(id, int):
                raise ValueError(f"event {position} names the stream {id!r}, which is not a number")
            stream = id
        elif kind == "record_stream":
            if id not in alive:
                raise ValueError(f"event {position} records a stream for {id!r}, which is not alive")
            allocator.record_stream(alive[id], nbytes)
        elif kind == "phase":
            peaks.begin(str(id), position)
        elif kind == "empty_cache":
            allocator.empty_cache()
        else:
            raise ValueError(f"event {position} is of the unknown kind {kind!r}")
        if watch is not None:
            watch(position, allocator, block)
        if curve:
            allocated_curve.append(allocator.allocated_bytes)
            reserved_curve.append(allocator.reserved_bytes)
    phases = peaks.finish(position + 1)
    return Replay(
        stats=allocator.memory_stats(), phases=phases, allocated_bytes=allocated_curve, reserved_bytes=reserved_curve,
        out_of_memory=out_of_memory, ended_at=None if out_of_memory is None else position, allocator=allocator,
    )  # fmt: skip
