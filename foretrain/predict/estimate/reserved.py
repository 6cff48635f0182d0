"""What PyTorch's allocator allocates and reserves for the ledger's tensors: its timeline, replayed. No torch.

A plan has to answer while a slider moves, so this knows only what a run without a limit needs of
predict/allocator/simulator.py: best fit in the large pool, split and merged, nothing given back (DeviceCachingAllocator
in c10/cuda/CUDACachingAllocator.cpp). Where the settings say otherwise predict/allocator/simulator.py itself replays.
Tests hold the two together.

Requests of up to 1 MiB have a pool of their own and are not replayed: thousands of biases and statistics a step, which
together weigh little. Their pool is taken to be as full as it gets.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

from foretrain.predict.allocator.blocks import Block
from foretrain.predict.allocator.settings import LARGE_SEGMENT_BYTES, MIN_LARGE_ALLOC_BYTES, Settings
from foretrain.predict.allocator.simulator import (
    MIN_BLOCK_BYTES,
    SEGMENT_ROUNDING_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Allocator,
    OutOfMemory,
)  # fmt: skip
from foretrain.predict.timeline import Events

# A free block is one number, its bytes above its address: the order in which blocks are looked for. The largest
# settings that a config may have take 2^91 bytes in all; no card has them, but a plan says so.
_ADDRESS_BITS = 100
_ADDRESSES = (1 << _ADDRESS_BITS) - 1


class Held(NamedTuple):
    """The most of a phase in bytes, as torch.cuda.max_memory_allocated and max_memory_reserved count."""

    allocated_bytes: int
    reserved_bytes: int


def held(timeline: Events, settings: Settings | None = None) -> dict[str, Held]:
    """{phase: the most that is allocated and reserved in it}, without a limit.

    Allocated is more than the tensors: a block of the large pool keeps up to 1 MiB that it was found too large by.
    """
    pool: LargePool | _Simulated = LargePool() if settings in (None, Settings()) else _Simulated(settings)
    sizes = [-(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for nbytes in timeline.sizes]
    events = timeline.events
    small = most_small = 0
    found: dict[str, Held] = {}
    for phase, start, end in timeline.spans():
        most = pool.allocated_bytes + small
        for event in events[start:end]:
            if event >= 0:
                nbytes = sizes[event]
                if nbytes > SMALL_BYTES:
                    pool.malloc(event, nbytes)
                else:
                    small += nbytes
                    if small > most_small:
                        most_small = small
                if (now := pool.allocated_bytes + small) > most:
                    most = now
            elif (nbytes := sizes[~event]) > SMALL_BYTES:
                pool.free(~event)
            else:
                small -= nbytes
        segments = -(-most_small // SMALL_SEGMENT_BYTES)
        before = found.get(phase, Held(0, 0)).allocated_bytes
        found[phase] = Held(max(most, before), pool.reserved_bytes + segments * SMALL_SEGMENT_BYTES)
    return found


def reserved_bytes(timeline: Events, settings: Settings | None = None) -> dict[str, int]:
    """{phase: the most that is reserved in it}, in bytes."""
    return {phase: each.reserved_bytes for phase, each in held(timeline, settings).items()}


def fails_in(timeline: Events, settings: Settings, limit_bytes: int) -> str | None:
    """The phase in which a request cannot be served, even after unused segments were given back, where the device has
    so much for the allocator; None where all are served."""
    allocator = Allocator(settings, limit_bytes, physical=True)
    blocks: dict[int, Block | None] = {}
    for phase, start, end in timeline.spans():
        for event in timeline.events[start:end]:
            try:
                if event >= 0:
                    blocks[event] = allocator.malloc(timeline.sizes[event])
                else:
                    allocator.free(blocks.pop(~event))
            except OutOfMemory:
                return phase
    return None


class LargePool:
    """The pool of requests beyond 1 MiB, with the allocator's own settings and no limit. Sizes are multiples of 512."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self._free: list[int] = []  # bytes << _ADDRESS_BITS | address, sorted
        self._size_at: dict[int, int] = {}  # free blocks by their first address
        self._start_of: dict[int, int] = {}  # and by the address after their last
        self._taken: dict[int, tuple[int, int]] = {}
        self._next_address = 0

    def malloc(self, id: int, nbytes: int) -> None:
        """The smallest free block that is large enough, else a new segment; what is over 1 MiB too much stays free."""
        free = self._free
        at = bisect_left(free, nbytes << _ADDRESS_BITS)
        if at < len(free):
            key = free.pop(at)
            size, address = key >> _ADDRESS_BITS, key & _ADDRESSES
            del self._size_at[address], self._start_of[address + size]
        else:
            size = (
                LARGE_SEGMENT_BYTES
                if nbytes < MIN_LARGE_ALLOC_BYTES
                else -(-nbytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
            )
            address = self._next_address
            self._next_address += size + SEGMENT_ROUNDING_BYTES  # a gap, as blocks of two segments never merge
            self.reserved_bytes += size
        if size - nbytes > SMALL_BYTES:
            rest, left = address + nbytes, size - nbytes
            insort(free, left << _ADDRESS_BITS | rest)
            self._size_at[rest], self._start_of[rest + left] = left, rest
            size = nbytes
        self._taken[id] = (address, size)
        self.allocated_bytes += size

    def free(self, id: int) -> None:
        """Back to the pool, as one block with its free neighbours."""
        free = self._free
        address, size = self._taken.pop(id)
        self.allocated_bytes -= size
        following = self._size_at.pop(address + size, 0)
        if following:
            del free[bisect_left(free, following << _ADDRESS_BITS | address + size)]
            size += following
            del self._start_of[address + size]
        before = self._start_of.pop(address, None)
        if before is not None:
            preceding = address - before
            del free[bisect_left(free, preceding << _ADDRESS_BITS | before)]
            address, size = before, size + preceding
        self._size_at[address], self._start_of[address + size] = size, address
        insort(free, size << _ADDRESS_BITS | address)


class _Simulated:
    """The same by predict/allocator/simulator.py, under other settings."""

    def __init__(self, settings: Settings | None) -> None:
        self._allocator = Allocator(settings)
        self._blocks: dict[int, Block | None] = {}

    def malloc(self, id: int, nbytes: int) -> None:
        self._blocks[id] = self._allocator.malloc(nbytes)

    def free(self, id: int) -> None:
        self._allocator.free(self._blocks.pop(id))

    @property
    def allocated_bytes(self) -> int:
        return self._allocator.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.peak_reserved_bytes
