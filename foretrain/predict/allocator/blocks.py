"""Blocks and the pools of free ones: what simulator.py and expandable.py work on. Standard library only.

From c10/cuda/CUDACachingAllocator.cpp: struct Block, struct BlockPool, BlockComparatorSize.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field


class Block:
    """A stretch of a segment, in use or free, linked to its neighbours; `mapped` is false for bare address space.

    `ptr`: address; `size`: bytes; `stream`: for which its segment was made; `requested`: bytes asked for, as long as it
    is in use; `other_streams`: those that use it too (stream_uses). It stays in use until their events have happened.
    """

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
        """Whether the segment holds other blocks too."""
        return self.prev is not None or self.next is not None

    def insert_after(self, block: "Block") -> None:
        """Link a new block behind this one."""
        block.prev, block.next = self, self.next
        if block.next is not None:
            block.next.prev = block
        self.next = block

    def insert_before(self, block: "Block") -> None:
        """Link a new block in front of this one."""
        block.prev, block.next = self.prev, self
        if block.prev is not None:
            block.prev.next = block
        self.prev = block

    def absorb(self, other: "Block") -> None:
        """A neighbour becomes part of this block."""
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
    """Free mapped blocks of the small or of the large pool, ordered by stream, then by size, then by address.

    `order` has the three in one number, which is compared sooner than a tuple.
    """

    small: bool
    order: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    searches: int = 0  # get_free_blocks_call_count: the clock by which garbage collection tells a block's age

    def add(self, block: Block) -> None:
        block.freed_at = self.searches
        insort(self.order, ((block.stream << BITS | block.size) << BITS) | block.ptr)
        self.blocks[block.ptr] = block

    def remove(self, block: Block) -> None:
        """A free block is taken, merged or given back."""
        del self.order[bisect_left(self.order, ((block.stream << BITS | block.size) << BITS) | block.ptr)]
        del self.blocks[block.ptr]

    def at_least(self, size: int, stream: int) -> int | None:
        """The position of a stream's smallest free block with so many bytes, of the lowest address among equals."""
        order = self.order
        position = bisect_left(order, (stream << BITS | size) << BITS)
        return position if position < len(order) and order[position] >> 2 * BITS == stream else None

    def take(self, size: int, stream: int) -> Block | None:
        """That block, which is free no longer; None where there is none."""
        order = self.order
        position = bisect_left(order, (stream << BITS | size) << BITS)
        if position == len(order) or order[position] >> 2 * BITS != stream:
            return None
        return self.blocks.pop(order.pop(position) & LOW)

    def at(self, position: int) -> Block:
        """The free block at a position of the order."""
        return self.blocks[self.order[position] & LOW]

    def all(self) -> list[Block]:
        return [self.blocks[key & LOW] for key in self.order]
