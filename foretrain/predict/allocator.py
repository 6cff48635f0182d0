"""PyTorch's CUDA caching allocator as a simulator: one device, one stream, the native backend. Standard library only.

Rules from c10/cuda/CUDACachingAllocator.cpp (class DeviceCachingAllocator); settings in `allocator_settings.py`,
expandable segments in `allocator_expandable.py`. Give it the sizes that a program asks for in their order, and it
says what the program would see in torch.cuda.memory_stats, and whether it would run out of memory.

    allocator = Allocator(limit_bytes=8 << 30)
    block = allocator.malloc(123_456)
    allocator.free(block)
    allocator.allocated_bytes, allocator.peak_reserved_bytes

Not modelled: other streams, CUDA graphs' private pools, cudaMallocAsync. Addresses of new segments only grow, those
of a driver need not; that matters for ties between blocks of one size alone.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from foretrain.predict.allocator_settings import Settings

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to it
SMALL_BYTES = 1 << 20  # kSmallSize: up to here a request is served by the small pool
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
MIN_OWN_SEGMENT_BYTES = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own size
SEGMENT_ROUNDING_BYTES = 2 << 20  # kRoundLarge


class OutOfMemory(MemoryError):
    """The request that could not be served, and what stood in its way; all in bytes."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes asked for; {reserved_bytes} reserved, of them {allocated_bytes} allocated; "
            f"the limit is {limit_bytes}"
        )
        self.requested_bytes, self.allocated_bytes = requested_bytes, allocated_bytes
        self.reserved_bytes, self.limit_bytes = reserved_bytes, limit_bytes


class Block:
    """A stretch of a segment, in use or free, linked to its neighbours; `mapped` is false for bare address space."""

    __slots__ = ("freed_at", "mapped", "next", "pool", "prev", "ptr", "requested", "size", "used")

    def __init__(self, ptr: int, size: int, pool: "Pool", mapped: bool = True) -> None:
        self.ptr, self.size, self.pool, self.mapped = ptr, size, pool, mapped
        self.requested = self.freed_at = 0
        self.used = False
        self.prev: Block | None = None
        self.next: Block | None = None

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


@dataclass
class Pool:
    """Free blocks of the small or of the large pool, ordered by size, then by address."""

    small: bool
    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    searches: int = 0  # get_free_blocks_call_count, the clock of the garbage collection

    def add(self, block: Block) -> None:
        """A block becomes free."""
        block.freed_at = self.searches
        insort(self.order, (block.size, block.ptr))
        self.blocks[block.ptr] = block

    def remove(self, block: Block) -> None:
        """A free block is taken, merged or given back."""
        del self.order[bisect_left(self.order, (block.size, block.ptr))]
        del self.blocks[block.ptr]

    def all(self) -> list[Block]:
        """Free blocks in order."""
        return [self.blocks[ptr] for _, ptr in self.order]


class Allocator:
    """The allocator's state and statistics (named as in torch.cuda.memory_stats).

    `limit_bytes`: what it may reserve. By default a cap as set_per_process_memory_fraction sets it, which also is
    what garbage_collection_threshold counts from; `physical` makes it the memory that the driver has left instead.
    """

    def __init__(
        self, settings: Settings | None = None, limit_bytes: int | None = None, *, physical: bool = False
    ) -> None:
        self.settings = settings or Settings()
        self.limit_bytes, self.physical = limit_bytes, physical
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = self.num_ooms = self.num_device_alloc = self.num_device_free = 0
        self.segments: list[tuple[str, int, int]] = []  # ("alloc" or "free", address, bytes), as a history records
        self._next_address = 1 << 40
        self._expandable = None
        if self.settings.expandable_segments:
            from foretrain.predict.allocator_expandable import ExpandableSegments

            self._expandable = ExpandableSegments(self)

    # -- asking and giving back ----------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> Block | None:
        """A block for a request; None for 0 bytes, which take nothing. Raises OutOfMemory."""
        if nbytes == 0:
            return None
        size = self.round(nbytes)
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self._find(pool, size)
        if block is None:
            self._collect_garbage()
            block = self._new(pool, size)
            if block is None and self._release_oversize(pool, size):
                block = self._new(pool, size)
            if block is None:
                self.empty_cache()
                self.num_alloc_retries += 1
                block = self._new(pool, size)
            if block is None:
                self.num_ooms += 1
                raise OutOfMemory(nbytes, self.allocated_bytes, self.reserved_bytes, self.limit_bytes or 0)
        if self._should_split(block, size):
            rest = Block(block.ptr + size, block.size - size, pool)
            block.insert_after(rest)
            block.size = size
            pool.add(rest)
        block.used, block.requested = True, nbytes
        self.requested_bytes += nbytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """A block is free again and joins its free neighbours; its segment stays reserved."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.used = False
        self.merge(block, block.prev)
        self.merge(block, block.next)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment back that is free as a whole (release_cached_blocks), and every free mapped page."""
        for pool in (self.large, self.small):
            for block in pool.all():
                if self._expandable is not None:
                    self._expandable.unmap(block)
                elif not block.is_split:
                    self._release(block)

    def reset_peak(self) -> None:
        """Peaks count from what is there now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    # -- sizes ---------------------------------------------------------------------------------------------

    def round(self, nbytes: int) -> int:
        """round_size: to 512 bytes, or with roundup_power2_divisions to a division of the power of two below."""
        if nbytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self.settings.divisions_of(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            division = floor >> (divisions.bit_length() - 1)
            if floor == nbytes:
                return nbytes
            return 2 * floor if division == 0 else -(-nbytes // division) * division
        return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, size: int) -> int:
        """get_allocation_size: what is asked of the driver for a block of this size."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < min(MIN_OWN_SEGMENT_BYTES, self.settings.large_segment_bytes):
            return self.settings.large_segment_bytes
        return -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._expandable is not None:
            return rest >= MIN_BLOCK_BYTES
        return size < self.settings.max_split_bytes and rest > SMALL_BYTES

    # -- finding -------------------------------------------------------------------------------------------

    def _find(self, pool: Pool, size: int) -> Block | None:
        """get_free_block: the smallest free block that is large enough, the lowest address among equals."""
        if self._collects:
            pool.searches += 1
        index = bisect_left(pool.order, (size, 0))
        if index == len(pool.order):
            return None
        block = pool.blocks[pool.order[index][1]]
        if self._expandable is not None:
            block = self._expandable.prefer(pool, index)
        limit = self.settings.max_split_bytes
        if size < limit <= block.size:
            return None  # an oversize block serves oversize requests only
        if size >= limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        """alloc_block: a new segment from the driver; None where the limit forbids it."""
        nbytes = self.segment_bytes(size)
        if self.limit_bytes is not None and not self.physical and self.reserved_bytes + nbytes > self.limit_bytes:
            return None
        if self._expandable is not None:
            return self._expandable.take(pool, size)
        if not self.reserve(nbytes):
            return None
        block = Block(self.address(nbytes), nbytes, pool)
        self.segments.append(("alloc", block.ptr, nbytes))
        return block

    def address(self, nbytes: int) -> int:
        """A stretch of fresh address space."""
        address = self._next_address
        self._next_address += -(-nbytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        return address

    def reserve(self, nbytes: int) -> bool:
        """Count bytes that the driver gives; False where there are none left."""
        if self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes:
            return False
        self.reserved_bytes += nbytes
        self.num_device_alloc += 1
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return True

    # -- giving back ---------------------------------------------------------------------------------------

    def merge(self, block: Block, other: Block | None) -> None:
        """try_merge_blocks: a free neighbour of the same kind becomes part of the block."""
        if other is None or other.used or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.remove(other)
        elif self._expandable is not None:
            self._expandable.forget(other)
        if block.prev is other:
            block.ptr, block.prev = other.ptr, other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self.num_device_free += 1
        self.segments.append(("free", block.ptr, block.size))

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """release_available_cached_blocks: with max_split_size_mb, as many oversize blocks as the request needs."""
        limit = self.settings.max_split_bytes
        if self.settings.max_split_is_unlimited or self._expandable is not None:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.order, (wanted, 0))
        if index < len(pool.order):
            self._release(pool.blocks[pool.order[index][1]])
            return True
        released = 0
        for block in reversed(pool.all()):
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    @property
    def _collects(self) -> bool:
        return self.settings.garbage_collection_threshold > 0 and self.limit_bytes is not None and not self.physical

    def _collect_garbage(self) -> None:
        """garbage_collect_cached_blocks: above the threshold, whole free segments of more than average age go."""
        if not self._collects or self.limit_bytes is None:
            return
        threshold = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        target, reclaimed = self.reserved_bytes - threshold, 0
        if target <= 0:
            return
        pool = self.large
        candidates = [block for block in pool.all() if not block.is_split and self._expandable is None]
        freed = True
        while reclaimed < target and freed and candidates:
            average = sum(pool.searches - block.freed_at for block in candidates) / len(candidates)
            old = [block for block in candidates if pool.searches - block.freed_at >= average]
            freed = bool(old)
            for block in old:
                reclaimed += block.size
                self._release(block)
            candidates = [block for block in candidates if block not in old]
