"""Lifetimes through the allocator: allocated and reserved bytes in each phase, and where a limit is hit. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.predict.allocator.blocks import Addresses, Block, Lifetimes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory

Watcher = Callable[[int, Allocator, Block | None], None]
BUILD = "build"  # the phase that a trace begins with


class PhasePeak(Record):
    """The peaks of allocated and reserved bytes in a phase. `position`: the allocated one's event; -1 before all."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    position: int


class MemoryFailure(Record):
    """The allocation that exceeded a limit: when, for what, and the memory then. Bytes."""

    phase: str
    moment: str
    op: str
    module: str
    position: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class Replay:
    phases: tuple[PhasePeak, ...]
    allocator: Allocator = field(compare=False)  # as it stands at the end, with the peaks of the whole
    failure: MemoryFailure | None = None
    out_of_memory: OutOfMemory | None = None

    @property
    def survives(self) -> bool:
        return self.failure is None

    @property
    def peak_allocated_bytes(self) -> int:
        return max((peak.allocated_bytes for peak in self.phases), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        return max((peak.reserved_bytes for peak in self.phases), default=0)

    @property
    def num_alloc_retries(self) -> int:
        return self.allocator.num_alloc_retries

    @property
    def stats(self) -> dict[str, int]:
        return self.allocator.memory_stats()


class Player:
    def __init__(self, lifetimes: Lifetimes, allocator: Allocator | None = None) -> None:
        self.lifetimes, self.allocator = lifetimes, allocator or Allocator()
        self.blocks: dict[int, Block | None] = {}

    def play(self, event: int) -> Block | None:
        """Return the block that is allocated or freed. Raises OutOfMemory under a limit."""
        found = self.lifetimes
        if event >= 0:
            stream = found.streams.get(event, 0) if found.streams else 0
            block = self.blocks[event] = self.allocator.malloc(found.sizes[event], stream)
            return block
        block = self.blocks.pop(~event)
        for stream in found.used_on.get(~event, ()) if found.used_on else ():
            self.allocator.record_stream(block, stream)
        self.allocator.free(block)
        return block


def replay(
    lifetimes: Lifetimes,
    settings: Settings | None = None,
    limit_bytes: int | None = None,
    *,
    physical: bool = False,
    cap_bytes: int | None = None,
    watch: Watcher | None = None,
    addresses: Addresses | None = None,
) -> Replay:
    """Run lifetimes through the allocator (Allocator's limits), to their end or the first allocation beyond a limit.
    `watch` gets a position, the allocator, and the block after each event; none before the cache is emptied."""
    player = Player(
        lifetimes, Allocator(settings, limit_bytes, physical=physical, cap_bytes=cap_bytes, addresses=addresses)
    )
    allocator, events, emptied = player.allocator, lifetimes.events, set(lifetimes.emptied)
    plainly = watch is None and allocator.is_plain and not (emptied or lifetimes.streams or lifetimes.used_on)
    peaks: dict[str, PhasePeak] = {}
    whole = (0, 0, 0)
    failure = error = None

    def empty(position: int) -> None:
        emptied.remove(position)
        allocator.empty_cache()
        if watch is not None:
            watch(position, allocator, None)

    for phase, start, end in lifetimes.spans():
        if start in emptied:
            empty(start)
        allocator.reset_peak()
        highest, highest_at = allocator.allocated_bytes, start - 1
        position = start
        try:
            if plainly:
                highest, at, last, ended = allocator.play(events[start:end], lifetimes.sizes, player.blocks)
                highest_at, position = start + at, start + last
                if ended is not None:
                    raise ended
            for position in () if plainly else range(start, end):
                if emptied and position in emptied:
                    empty(position)
                block = player.play(events[position])
                if allocator.allocated_bytes > highest:
                    highest, highest_at = allocator.allocated_bytes, position
                if watch is not None:
                    watch(position, allocator, block)
        except OutOfMemory as refused:
            error, failure = refused, _failure(lifetimes, position, refused)
        a = allocator
        now = a.peak_allocated_bytes, a.peak_reserved_bytes, a.peak_requested_bytes
        whole = tuple(map(max, whole, now))
        if end or phase not in ("", BUILD):  # where the code names its first phase at once there is none before
            peaks[phase] = _higher(peaks.get(phase), phase, highest, highest_at, allocator.peak_reserved_bytes)
        if failure is not None:
            break
    if len(events) in emptied and failure is None:
        empty(len(events))
    allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.peak_requested_bytes = whole
    return Replay(tuple(peaks.values()), allocator, failure, error)


def _higher(before: PhasePeak | None, phase: str, allocated: int, position: int, reserved: int) -> PhasePeak:
    if before is not None:
        reserved = max(reserved, before.reserved_bytes)
        if before.allocated_bytes >= allocated:
            allocated, position = before.allocated_bytes, before.position
    return PhasePeak(phase=phase, allocated_bytes=allocated, reserved_bytes=reserved, position=position)


def _failure(lifetimes: Lifetimes, position: int, error: OutOfMemory) -> MemoryFailure:
    return MemoryFailure(
        phase=lifetimes.phase_at(position), **lifetimes.label(position)._asdict(), position=position,
        requested_bytes=error.requested_bytes, allocated_bytes=error.allocated_bytes,
        reserved_bytes=error.reserved_bytes, limit_bytes=error.limit_bytes,
    )  # fmt: skip


class Tried:
    """Replays under limits. One holds for all limits between the most granted and the least refused bytes."""

    def __init__(
        self,
        lifetimes: Lifetimes,
        settings: Settings | None = None,
        *,
        physical: bool = False,
        cap_bytes: int | None = None,
    ) -> None:
        self.lifetimes, self.settings, self.physical, self.cap_bytes = lifetimes, settings, physical, cap_bytes
        self._made: list[Replay] = []

    def failure(self, limit_bytes: int) -> MemoryFailure | None:
        failure = self._like(limit_bytes).failure
        if failure is None or failure.limit_bytes == limit_bytes or self.cap_bytes is not None:
            return failure
        return failure.model_copy(update={"limit_bytes": limit_bytes})

    def _like(self, limit_bytes: int) -> Replay:
        for made in self._made:
            if made.allocator.granted_bytes <= limit_bytes < made.allocator.refused_bytes:
                return made
        made = replay(self.lifetimes, self.settings, limit_bytes, physical=self.physical, cap_bytes=self.cap_bytes)
        # Garbage collection counts from the limit itself, and a second limit counts too.
        if self.cap_bytes is None and not made.allocator.collects:
            self._made.append(made)
        return made


def smallest_limit_bytes(
    lifetimes: Lifetimes,
    settings: Settings | None = None,
    *,
    physical: bool = False,
    free: Replay | None = None,
    tried: Tried | None = None,
) -> int:
    """Return the least memory under which all requests are served, to a MiB. `free`: replayed without a limit."""
    free = free or replay(lifetimes, settings)
    tried = tried or Tried(lifetimes, settings, physical=physical)
    low, high = max(free.peak_allocated_bytes // 2, 0), -(-free.peak_reserved_bytes // MIB) * MIB
    least = _least_bytes(lifetimes, settings or Settings(), physical=physical)
    while high - low > MIB:
        middle = (low + high) // 2 // MIB * MIB
        if middle in (low, high):
            break
        if middle >= least and tried.failure(middle) is None:
            high = middle
        else:
            low = middle
    return high


def _least_bytes(lifetimes: Lifetimes, settings: Settings, *, physical: bool) -> int:
    """Return the peak of rounded blocks, below which no limit works; 0 for a cap on expandable pages."""
    if settings.expandable_segments and not physical:
        return 0
    allocator, sizes = Allocator(settings), lifetimes.sizes
    rounded: dict[int, int] = {}
    now = most = 0
    for event in lifetimes.events:
        nbytes = sizes[event] if event >= 0 else sizes[~event]
        size = rounded.get(nbytes)
        if size is None:
            size = rounded[nbytes] = allocator.round(nbytes) if nbytes else 0
        now += size if event >= 0 else -size
        if now > most:
            most = now
    return most
