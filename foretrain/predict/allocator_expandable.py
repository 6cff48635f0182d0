"""Expandable segments: one stretch of addresses a pool, on which pages are mapped as they are needed.

From c10/cuda/CUDACachingAllocator.cpp: ExpandableSegment, try_allocate_expandable_block, map_block, unmap_block.
"""

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from foretrain.predict.allocator_settings import SMALL_PAGE_BYTES

if TYPE_CHECKING:
    from foretrain.predict.allocator import Allocator, Block, Pool

ADDRESS_SPACE_BYTES = 1 << 41  # more than any card has; PyTorch takes 1 1/8 of the device's memory


class ExpandableSegments:
    """Both pools' stretches, with the unmapped blocks in order of address."""

    def __init__(self, allocator: "Allocator") -> None:
        self.allocator = allocator
        self.bases: dict[bool, int] = {}
        self.unmapped: dict[bool, list[int]] = {True: [], False: []}
        self.blocks: dict[int, Block] = {}

    def page_bytes(self, pool: "Pool") -> int:
        """2 MiB pages in the small pool; the large pool maps as much as a large segment at once."""
        return SMALL_PAGE_BYTES if pool.small else self.allocator.settings.large_segment_bytes

    def _keep(self, block: "Block") -> None:
        insort(self.unmapped[block.pool.small], block.ptr)
        self.blocks[block.ptr] = block

    def forget(self, block: "Block") -> None:
        """An unmapped block is mapped or merged."""
        order = self.unmapped[block.pool.small]
        del order[bisect_left(order, block.ptr)]
        del self.blocks[block.ptr]

    def prefer(self, pool: "Pool", index: int) -> "Block":
        """Best fit counts what a block can grow to, so a larger block with less room behind it goes first."""

        def reach(block: "Block") -> int:
            after = block.next
            return block.size + (after.size if after is not None and not after.mapped else 0)

        block = pool.blocks[pool.order[index][1]]
        while index + 1 < len(pool.order):
            following = pool.blocks[pool.order[index + 1][1]]
            if reach(following) >= reach(block):
                break
            index, block = index + 1, following
        return block

    def take(self, pool: "Pool", size: int) -> "Block | None":
        """Map pages behind the lowest free stretch that can hold the block; None where memory runs out."""
        found = self._candidate(pool, size)
        if not found.mapped and not self._map(found, min(found.size, size)):
            return None
        while found.size < size:
            following = found.next
            assert following is not None
            if not self._map(following, min(size - found.size, following.size)):
                return None
            found = following  # it has absorbed the block before it
        pool.remove(found)
        return found

    def _candidate(self, pool: "Pool", size: int) -> "Block":
        """find_expandable_block: in order of address, where free and unmapped blocks in a row are large enough."""
        for address in self.unmapped[pool.small]:
            block = self.blocks[address]
            first = block.prev if block.prev is not None and not block.prev.used else block
            room, at = 0, first
            while at is not None and not at.used and room < size:
                room += at.size
                at = at.next
            if room >= size:
                return first
        return self._new_stretch(pool)

    def _new_stretch(self, pool: "Pool") -> "Block":
        from foretrain.predict.allocator import Block

        block = Block(self.allocator.address(ADDRESS_SPACE_BYTES), ADDRESS_SPACE_BYTES, pool, mapped=False)
        self.bases[pool.small] = block.ptr
        self._keep(block)
        return block

    def _map(self, block: "Block", nbytes: int) -> bool:
        """Whole pages at the front of an unmapped block become a free block, joined with free neighbours."""
        from foretrain.predict.allocator import Block

        page = self.page_bytes(block.pool)
        nbytes = min(-(-nbytes // page) * page, block.size)
        if not self.allocator.reserve(nbytes):
            return False
        self.forget(block)
        if nbytes < block.size:
            rest = Block(block.ptr + nbytes, block.size - nbytes, block.pool, mapped=False)
            block.insert_after(rest)
            block.size = nbytes
            self._keep(rest)
        block.mapped = True
        self.allocator.segments.append(("alloc", block.ptr, nbytes))
        self.allocator.merge(block, block.prev)
        self.allocator.merge(block, block.next)
        block.pool.add(block)
        return True

    def unmap(self, block: "Block") -> None:
        """Pages that lie wholly in a free block go back; what is left of it at both ends stays free."""
        from foretrain.predict.allocator import Block

        pool, page, base = block.pool, self.page_bytes(block.pool), self.bases[block.pool.small]
        low = -(-(block.ptr - base) // page) * page + base
        high = (block.ptr + block.size - base) // page * page + base
        if high <= low:
            return
        pool.remove(block)
        self.allocator.reserved_bytes -= high - low
        self.allocator.num_device_free += 1
        self.allocator.segments.append(("free", low, high - low))
        if block.ptr < low:
            before = Block(block.ptr, low - block.ptr, pool)
            before.prev, before.next = block.prev, block
            if before.prev is not None:
                before.prev.next = before
            block.prev = before
            pool.add(before)
        if block.ptr + block.size > high:
            after = Block(high, block.ptr + block.size - high, pool)
            block.insert_after(after)
            pool.add(after)
        block.ptr, block.size, block.mapped = low, high - low, False
        self.allocator.merge(block, block.prev)
        self.allocator.merge(block, block.next)
        self._keep(block)
