"""Expandable segments (c10/cuda/CUDACachingAllocator.cpp): an address range for each stream and pool."""

from bisect import bisect_left, bisect_right, insort
from typing import Protocol

from foretrain.predict.allocator.blocks import LOW, Block, Pool
from foretrain.predict.allocator.settings import Settings

SMALL_PAGE_BYTES = 2 << 20  # kSmallBuffer; the large pool's pages are as large as a large segment
# PyTorch takes 1 1/8 of the device's memory. The simulator knows no device, so its range is larger than any card; like
# PyTorch it begins another one when full, as long as the request if need be.
STRETCH_BYTES = 1 << 41


class Maps(Protocol):
    """The allocator (simulator.py) whose pages are mapped."""

    settings: Settings
    segments: list[tuple[str, int, int, int]]
    reserved_bytes: int
    num_device_free: int

    def new_address(self, nbytes: int) -> int: ...
    def reserve(self, nbytes: int) -> bool: ...
    def merge(self, block: Block, other: Block | None) -> None: ...


def _reach(block: Block) -> int:
    after = block.next
    return block.size if after is None or after.mapped else block.size + after.size


class ExpandableSegments:
    """Address ranges of both pools, with their unmapped blocks by stream and address (BlockComparatorAddress)."""

    def __init__(self, allocator: Maps) -> None:
        self.allocator = allocator
        self.bases: list[int] = []  # where stretches begin, in order
        self.unmapped: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.blocks: dict[int, Block] = {}

    def page_bytes(self, pool: Pool) -> int:
        return SMALL_PAGE_BYTES if pool.small else self.allocator.settings.large_segment_bytes

    def _keep(self, block: Block) -> None:
        insort(self.unmapped[block.pool.small], (block.stream, block.ptr))
        self.blocks[block.ptr] = block

    def forget(self, block: Block) -> None:
        order = self.unmapped[block.pool.small]
        del order[bisect_left(order, (block.stream, block.ptr))]
        del self.blocks[block.ptr]

    def prefer(self, pool: Pool, position: int) -> Block:
        """get_free_block: best fit by what a block can grow to, so a larger one with less room behind goes first."""

        order, blocks = pool.order, pool.blocks
        block = blocks[order[position] & LOW]
        reach = _reach(block)
        for following_position in range(position + 1, len(order)):
            following = blocks[order[following_position] & LOW]
            further = _reach(following)
            if following.stream != block.stream or further >= reach:
                break
            block, reach = following, further
        return block

    def take(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages behind the lowest free range that can hold the block; None where memory runs out."""
        found = self._find(pool, size, stream)
        if not found.mapped and not self._map(found, min(found.size, size)):
            return None
        while found.size < size:
            following = found.next
            assert following is not None  # _find made sure of the room
            if not self._map(following, min(size - found.size, following.size)):
                return None
            found = following  # it has absorbed the block before it
        pool.remove(found)
        return found

    def _find(self, pool: Pool, size: int, stream: int) -> Block:
        """find_expandable_block: the lowest address where free and unmapped blocks in a row are large enough."""
        unmapped = self.unmapped[pool.small]
        for of_stream, address in unmapped[bisect_left(unmapped, (stream, 0)) :]:
            if of_stream != stream:
                break
            first = self.blocks[address]
            if first.prev is not None and not first.prev.used:
                first = first.prev
            room, block = 0, first
            while block is not None and not block.used and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return first
        page = self.page_bytes(pool)
        stretch_bytes = max(STRETCH_BYTES, -(-size // page) * page)
        block = Block(self.allocator.new_address(stretch_bytes), stretch_bytes, pool, stream, mapped=False)
        insort(self.bases, block.ptr)
        self._keep(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """map_block: whole pages at the front of an unmapped block become a free block, joined with its neighbours."""
        page = self.page_bytes(block.pool)
        nbytes = min(-(-nbytes // page) * page, block.size)
        if not self.allocator.reserve(nbytes):
            return False
        self.forget(block)
        if nbytes < block.size:
            rest = Block(block.ptr + nbytes, block.size - nbytes, block.pool, block.stream, mapped=False)
            block.insert_after(rest)
            block.size = nbytes
            self._keep(rest)
        block.mapped = True
        self.allocator.segments.append(("map", block.ptr, nbytes, block.stream))
        self.allocator.merge(block, block.prev)
        self.allocator.merge(block, block.next)
        block.pool.add(block)
        return True

    def unmap(self, block: Block) -> None:
        """unmap_block: pages that lie wholly in a free block go back; what is left at both ends stays free."""
        pool, page = block.pool, self.page_bytes(block.pool)
        base = self.bases[bisect_right(self.bases, block.ptr) - 1]
        low = base + -(-(block.ptr - base) // page) * page
        high = base + (block.ptr + block.size - base) // page * page
        if high <= low:
            return
        pool.remove(block)
        if block.ptr < low:
            before = Block(block.ptr, low - block.ptr, pool, block.stream)
            block.insert_before(before)
            pool.add(before)
        if block.ptr + block.size > high:
            after = Block(high, block.ptr + block.size - high, pool, block.stream)
            block.insert_after(after)
            pool.add(after)
        block.ptr, block.size, block.mapped = low, high - low, False
        self.allocator.merge(block, block.prev)
        self.allocator.merge(block, block.next)
        self._keep(block)
        self.allocator.reserved_bytes -= high - low
        self.allocator.num_device_free += 1
        self.allocator.segments.append(("unmap", low, high - low, block.stream))
        if not block.is_split:
            self.forget(block)
            self.bases.remove(base)
