"""Blocks and pools of free ones (c10/cuda/CUDACachingAllocator.cpp: struct Block, BlockPool, BlockComparatorSize)."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from foretrain.predict import software

FIRST_ADDRESS = 1 << 52  # below is room for 2,048 expandable segments
GRANULE_BYTES = 2 << 20  # of a driver
CHUNK_BYTES = 32 << 20


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class Addresses(Protocol):
    def new(self, nbytes: int) -> int: ...


class Rising:
    """Each segment after the last one, in order of age, as in a public snapshot of what seems to be WSL 2
    (NiuHuangxiaozi/assignment2-systems, forward_and_backward_memory_snapshot_100: 48 of 65, most others in gaps).
    """

    def __init__(self) -> None:
        self._next = FIRST_ADDRESS

    def new(self, nbytes: int) -> int:
        address = self._next
        self._next += _up(nbytes, GRANULE_BYTES)
        return address


class Falling:
    """As on an H100 under Linux: chunks of whole 32 MiB, each below the last one. The rest of a chunk goes to later
    segments that fit, the lowest first.

    In a public snapshot of an H100-class card (kkaitlyn111/cs336-a2-systems, memory_ctx128_fullstep_) 667 of 782 new
    segments begin such a chunk and 114 follow another directly. Not modelled: on an H100 the first 13 to 16 segments
    filled 512 MiB upwards, and freed addresses are not reused.
    """

    def __init__(self) -> None:
        self._lowest = FIRST_ADDRESS
        self._left: dict[int, list[int]] = {}  # of chunks: addresses by bytes, the lowest first

    def new(self, nbytes: int) -> int:
        nbytes = _up(nbytes, GRANULE_BYTES)
        fitting = [(places[0], left) for left, places in self._left.items() if left >= nbytes and places]
        if fitting:
            address, left = min(fitting)
            heappop(self._left[left])
        else:
            left = _up(nbytes, CHUNK_BYTES)
            self._lowest -= left
            address = self._lowest
        if left > nbytes:
            heappush(self._left.setdefault(left - nbytes, []), address + nbytes)
        return address


def usual(reuses_oldest: bool | None = None) -> Addresses:
    """Return addresses as a torch that does, or does not, order segments under Linux; None: as the plans' torch."""
    oldest = software.of("").reuses_oldest if reuses_oldest is None else reuses_oldest
    return Rising() if oldest else Falling()


class Block:
    """A range of a segment, in use or free; `mapped` is false for bare address space. `requested`: bytes asked for,
    while in use; `other_streams`: those that use it too (stream_uses)."""

    __slots__ = (
        "freed_at", "mapped", "next", "other_streams", "pool", "prev", "ptr", "requested", "size", "stream", "used",
    )  # fmt: skip

    def __init__(self, ptr: int, size: int, pool: "Pool", stream: int = 0, *, mapped: bool = True) -> None:
        self.ptr, self.size, self.pool, self.stream, self.mapped = ptr, size, pool, stream, mapped
        self.requested = self.freed_at = 0
        self.used = False
        self.other_streams: tuple[int, ...] = ()
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        state = "in use" if self.used else "free" if self.mapped else "unmapped"
        return f"<Block {self.ptr:#x} {self.size} bytes, {state}>"

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def insert_after(self, block: "Block") -> None:
        block.prev, block.next = self, self.next
        if block.next is not None:
            block.next.prev = block
        self.next = block

    def insert_before(self, block: "Block") -> None:
        block.prev, block.next = self.prev, self
        if block.prev is not None:
            block.prev.next = block
        self.prev = block

    def absorb(self, other: "Block") -> None:
        if self.prev is other:
            self.ptr, self.prev = other.ptr, other.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.prev = self
        self.size += other.size


BITS = 64  # of an address, and of a size
LOW = (1 << BITS) - 1


@dataclass(eq=False)
class Pool:
    """Free mapped blocks of the small or large pool, ordered by stream, size and address, as one number each."""

    small: bool
    order: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    searches: int = 0  # get_free_blocks_call_count: the clock by which garbage collection tells a block's age

    def add(self, block: Block) -> None:
        block.freed_at = self.searches
        insort(self.order, ((block.stream << BITS | block.size) << BITS) | block.ptr)
        self.blocks[block.ptr] = block

    def remove(self, block: Block) -> None:
        del self.order[bisect_left(self.order, ((block.stream << BITS | block.size) << BITS) | block.ptr)]
        del self.blocks[block.ptr]

    def at_least(self, size: int, stream: int) -> int | None:
        """Return position of a stream's smallest free block with so many bytes, of the lowest address among equals."""
        order = self.order
        position = bisect_left(order, (stream << BITS | size) << BITS)
        return position if position < len(order) and order[position] >> 2 * BITS == stream else None

    def at(self, position: int) -> Block:
        return self.blocks[self.order[position] & LOW]

    def all(self) -> list[Block]:
        return [self.blocks[key & LOW] for key in self.order]


# A program's requests to the allocator, in order. The estimate (predict/timeline.py), the trace
# (predict/trace/record.py) and a recorded snapshot (predict/snapshot.py) make lifetimes; replay.py runs them through
# the allocator. An event is a number: `id` allocates a storage, `~id` (negative) frees it, so forty thousand events are
# one small list.

# Streams from here on: n * GRAPH_POOL + s is the n-th pool of a CUDA graph recorded on stream s.
GRAPH_POOL = 1 << 16


class Mark(NamedTuple):
    """The phase (or the moment of the step) from this position of the events on."""

    position: int
    name: str


class Label(NamedTuple):
    moment: str = ""
    op: str = ""
    module: str = ""


class Lifetimes:
    """Allocations and frees of storages in program order. `sizes`: bytes by id. `phases`: marks; a phase may come
    again. `streams`: of storages beside the default stream's (GRAPH_POOL: of graphs); `used_on`: other streams that use
    them. `emptied`: where the cache is emptied before."""

    def __init__(
        self,
        events: Sequence[int] = (),
        sizes: Sequence[int] = (),
        phases: Sequence[Mark] = (),
        streams: dict[int, int] | None = None,
        used_on: dict[int, tuple[int, ...]] | None = None,
        emptied: Sequence[int] = (),
    ) -> None:
        self.events, self.sizes, self.phases = events, sizes, phases
        self.streams = {} if streams is None else streams
        self.used_on = {} if used_on is None else used_on
        self.emptied = frozenset(emptied)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield (phase, position of its first event, position after its last) in order; '' before the first mark."""
        marks = list(self.phases)
        if not marks or marks[0].position > 0:
            marks.insert(0, Mark(0, ""))
        ends = [mark.position for mark in marks[1:]] + [len(self.events)]
        for mark, end in zip(marks, ends, strict=True):
            yield mark.name, mark.position, end

    def phase_at(self, position: int) -> str:
        return name_at(self.phases, position)

    def label(self, position: int) -> Label:
        return Label()


def name_at(marks: Sequence[Mark], position: int) -> str:
    index = bisect_right(marks, position, key=lambda mark: mark.position) - 1
    return marks[index].name if index >= 0 else ""
