"""PyTorch's CUDA caching allocator as a simulator: one device, the native backend. Standard library only.

Rules from c10/cuda/CUDACachingAllocator.cpp, class DeviceCachingAllocator, of PyTorch 2.11 to 2.13, whose functions are
named. Settings are in settings.py, expandable segments in expandable.py, replays of events in replay.py. Given a
program's requests in their order, it computes torch.cuda.memory_stats, and whether memory runs out.

    allocator = Allocator(limit_bytes=8 << 30)
    block = allocator.malloc(123_456)
    allocator.free(block)
    allocator.allocated_bytes, allocator.peak_reserved_bytes

Free memory belongs to its segment's stream. A block that another stream uses (record_stream) comes back at the first
request after it was freed: that stream's work is taken to be done by then. On a card it may come back later, at the
latest when the cache is emptied.

A pool of CUDA graphs (GRAPH_POOL) is a stream whose segments live to the end.

Not modelled: MemPools, cudaMallocAsync. Between free blocks of one size the lower address wins; blocks.py orders new
segments as the installed torch does, by default.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from foretrain.predict.allocator.blocks import BITS, GRAPH_POOL, LOW, Addresses, Block, Pool, usual
from foretrain.predict.allocator.expandable import ExpandableSegments
from foretrain.predict.allocator.settings import MIN_LARGE_ALLOC_BYTES, Settings

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to it
SMALL_BYTES = 1 << 20  # kSmallSize: up to here a request is served by the small pool
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
SEGMENT_ROUNDING_BYTES = 2 << 20  # kRoundLarge
NO_LIMIT_BYTES = 1 << 63


class OutOfMemory(MemoryError):
    """A request that could not be served, and the memory then, in bytes; `segment_bytes`: asked of the driver, the size
    in PyTorch's own message."""

    def __init__(
        self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int, segment_bytes: int = 0
    ) -> None:
        super().__init__(
            f"{requested_bytes} bytes asked for, which takes a segment of {segment_bytes}; "
            f"{reserved_bytes} are reserved, {allocated_bytes} of them allocated; the limit is {limit_bytes}"
        )
        self.requested_bytes, self.segment_bytes = requested_bytes, segment_bytes
        self.allocated_bytes, self.reserved_bytes, self.limit_bytes = allocated_bytes, reserved_bytes, limit_bytes


def _lowest(*limits_bytes: int | None) -> int | None:
    return min((limit for limit in limits_bytes if limit is not None), default=None)


class Allocator:
    """The allocator's state and statistics (named as in torch.cuda.memory_stats).

    `limit_bytes` is by default a cap as of set_per_process_memory_fraction: checked before a segment is made, and the
    base of garbage_collection_threshold. Expandable segments can pass such a cap by less than a page, as in PyTorch,
    whose cap and pages have different units. `physical` makes it the driver's remaining memory instead: never passed,
    and no garbage collection. `cap_bytes` is a cap beside the limit, as of per_process_memory_fraction. `segments` is
    the history of ("alloc", "free", "map" or "unmap", address, bytes, stream), as in _record_memory_history.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        limit_bytes: int | None = None,
        *,
        physical: bool = False,
        cap_bytes: int | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.limit_bytes, self.physical = limit_bytes, physical
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.active: dict[int, Block] = {}  # blocks in use by address
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = self.peak_requested_bytes = 0
        self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_device_alloc = self.num_device_free = 0
        self.segments: list[tuple[str, int, int, int]] = []
        # All bytes together: the most that the limits granted, the least that they refused. Limits in between give the
        # same replay.
        self.granted_bytes, self.refused_bytes = 0, NO_LIMIT_BYTES
        self._pending: list[Block] = []  # freed, while other streams may still use them (cuda_events)
        self._active_at_reset_bytes = 0
        self._addresses = addresses or usual(self.settings.reuses_oldest)
        self._cap_bytes = _lowest(cap_bytes, None if physical else limit_bytes)
        self.collects = self.settings.garbage_collection_threshold > 0 and self._cap_bytes is not None
        self._expandable = ExpandableSegments(self) if self.settings.expandable_segments else None
        self.is_plain = self.settings.max_split_is_unlimited and not self.settings.roundup_power2_divisions
        self.is_plain = self.is_plain and self._expandable is None and not self.collects

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """Return a block on a stream; None for 0 bytes. Raises OutOfMemory, and ValueError below 0."""
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"{nbytes} bytes cannot be allocated")
            return None
        if self._pending:
            self._process_events()
        size = self.round(nbytes)
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self._find(pool, size, stream) or self._obtain(pool, size, stream, nbytes)
        if (left := block.size - size) and self._should_split(block, size):
            rest = Block(block.ptr + size, left, pool, stream)  # alloc_found_block
            block.insert_after(rest)
            block.size = size
            pool.add(rest)
        block.used, block.requested = True, nbytes
        self.active[block.ptr] = block
        self.requested_bytes += nbytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def play(
        self, events: Sequence[int], sizes: Sequence[int], blocks: dict[int, Block | None]
    ) -> tuple[int, int, int, OutOfMemory | None]:
        """Allocate and free as `malloc` and `free` do where `is_plain`, in one loop for a hundred thousand events.
        `blocks`: those in use. Return the most allocated bytes, where (-1: before all), the end, and what ended it."""
        allocated = highest = self.allocated_bytes
        requested, most = self.requested_bytes, self.peak_requested_bytes
        highest_at, position, error = -1, -1, None
        for position, event in enumerate(events):
            if event < 0:
                if (block := blocks.pop(~event)) is None:
                    continue
                allocated -= block.size
                requested -= block.requested
                block.used, block.requested = False, 0
                pool = block.pool
                for other in (block.prev, block.next):
                    if other is not None and not other.used:
                        del pool.order[bisect_left(pool.order, other.size << BITS | other.ptr)]
                        del pool.blocks[other.ptr]
                        block.absorb(other)
                insort(pool.order, block.size << BITS | block.ptr)
                pool.blocks[block.ptr] = block
                continue
            if not (nbytes := sizes[event]):
                blocks[event] = None
                continue
            size = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            pool = self.small if size <= SMALL_BYTES else self.large
            place = bisect_left(pool.order, size << BITS)
            if place < len(pool.order):
                block = pool.blocks.pop(pool.order.pop(place) & LOW)
            else:
                self.allocated_bytes = allocated
                try:
                    block = self._obtain(pool, size, 0, nbytes)
                except OutOfMemory as refused:
                    error = refused
                    break
            left = block.size - size
            if left > SMALL_BYTES or (left and pool.small):
                rest = Block(block.ptr + size, left, pool)
                block.insert_after(rest)
                block.size = size
                insort(pool.order, left << BITS | rest.ptr)
                pool.blocks[rest.ptr] = rest
            block.used, block.requested = True, nbytes
            blocks[event] = block
            requested += nbytes
            if requested > most:
                most = requested
            allocated += block.size
            if allocated > highest:
                highest, highest_at = allocated, position
        self.active = {block.ptr: block for block in blocks.values() if block is not None}
        self.allocated_bytes, self.requested_bytes, self.peak_requested_bytes = allocated, requested, most
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, highest)
        return highest, highest_at, position, error

    def record_stream(self, block: Block | None, stream: int) -> None:
        """Record another stream's use of a block (recordStream). Raises ValueError for a block that is not in use."""
        if block is None:
            return
        if self.active.get(block.ptr) is not block:
            raise ValueError(f"{block!r} is not in use")
        if stream != block.stream and stream not in block.other_streams:
            block.other_streams += (stream,)

    def free(self, block: Block | None) -> None:
        """Free a block, at the next request if another stream uses it; its segment stays reserved (free). Raises
        ValueError for a block that is not in use."""
        if block is None:
            return
        if self.active.pop(block.ptr, None) is not block:
            raise ValueError(f"{block!r} is not in use")
        self.allocated_bytes -= block.size
        if block.other_streams:
            self._pending.append(block)
        else:
            self._free(block)

    def _free(self, block: Block) -> None:
        """free_block: it joins its free neighbours."""
        self.requested_bytes -= block.requested
        block.used, block.requested = False, 0
        self.merge(block, block.prev)
        self.merge(block, block.next)
        block.pool.add(block)

    def _process_events(self) -> None:
        """process_events: no other stream uses pending blocks any more."""
        for block in self._pending:
            block.other_streams = ()
            self._free(block)
        self._pending.clear()

    def empty_cache(self) -> None:
        """Release every wholly free segment and free mapped page (release_cached_blocks), of all streams after waiting
        for them (synchronize_and_free_events); not of graphs' pools."""
        self._process_events()
        for pool in (self.large, self.small):
            for block in pool.all():
                if block.stream >= GRAPH_POOL:
                    continue
                if self._expandable is not None:
                    self._expandable.unmap(block)
                elif not block.is_split:
                    self._release(block)

    def reset_peak(self) -> None:
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes
        self.peak_requested_bytes, self._active_at_reset_bytes = self.requested_bytes, self.active_bytes

    @property
    def active_bytes(self) -> int:
        """Return allocated bytes, and freed ones that other streams may still use."""
        return self.allocated_bytes + sum(block.size for block in self._pending)

    def memory_stats(self) -> dict[str, int]:
        stats = {}
        # Active differs from allocated only between a free and the next request, where it cannot reach a peak.
        peak_active_bytes = max(self.peak_allocated_bytes, self._active_at_reset_bytes)
        for name, current, peak in (
            ("allocated_bytes", self.allocated_bytes, self.peak_allocated_bytes),
            ("active_bytes", self.active_bytes, peak_active_bytes),
            ("reserved_bytes", self.reserved_bytes, self.peak_reserved_bytes),
            ("requested_bytes", self.requested_bytes, self.peak_requested_bytes),
        ):
            stats[f"{name}.all.current"], stats[f"{name}.all.peak"] = current, peak
        for name in ("num_alloc_retries", "num_ooms", "num_oom_rejections", "num_device_alloc", "num_device_free"):
            stats[name] = getattr(self, name)
        return stats

    def live_segments(self) -> list[list[Block]]:
        """Return blocks by address, one list per segment; of an expandable one per mapped range (snapshot)."""
        blocks = [*self.small.blocks.values(), *self.large.blocks.values(), *self.active.values(), *self._pending]
        heads = [block for block in blocks if block.prev is None or not block.prev.mapped]
        found = []
        for head in sorted(heads, key=lambda block: block.ptr):
            segment, block = [], head
            while block is not None and block.mapped:
                segment.append(block)
                block = block.next
            found.append(segment)
        return found

    def round(self, nbytes: int) -> int:
        """round_size: up to 512 bytes, or with roundup_power2_divisions to a part of the power of two below."""
        if not self.settings.roundup_power2_divisions:
            return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        divisions = self.settings.divisions_of(nbytes)
        step = MIN_BLOCK_BYTES
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions  # roundup_power2_next_division
        return -(-nbytes // step) * step

    def segment_bytes(self, size: int) -> int:
        """get_allocation_size: the driver's allocation for a block of this size."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_ALLOC_BYTES:
            return self.settings.large_segment_bytes
        return -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self._expandable is not None:
            return rest >= MIN_BLOCK_BYTES
        return size < self.settings.max_split_bytes and rest > SMALL_BYTES

    def _find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """get_free_block: the stream's smallest free block that is large enough, the lowest address among equals."""
        if self.collects:
            pool.searches += 1
        position = pool.at_least(size, stream)
        if position is None:
            return None
        block = pool.at(position) if self._expandable is None else self._expandable.prefer(pool, position)
        split_limit = self.settings.max_split_bytes
        if size < split_limit <= block.size:
            return None  # an oversize block serves oversize requests only
        if size >= split_limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _obtain(self, pool: Pool, size: int, stream: int, nbytes: int) -> Block:
        """malloc() where no free block was found: a new segment, if need be after releasing the cache."""
        if self.collects:
            self._collect_garbage()
        if self.settings.throw_on_cudamalloc_oom and self._passes_cap(self.segment_bytes(size)):
            self.num_oom_rejections += 1
            raise self._out_of_memory(size, nbytes)
        block = self._alloc_block(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._alloc_block(pool, size, stream)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._alloc_block(pool, size, stream)
        if block is None:
            self.num_ooms += 1
            raise self._out_of_memory(size, nbytes)
        return block

    def _alloc_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """alloc_block: a block in a new segment or on newly mapped pages; None where the limit forbids it."""
        nbytes = self.segment_bytes(size)
        if self._passes_cap(nbytes):
            return None
        if self._expandable is not None:
            return self._expandable.take(pool, size, stream)
        if not self.reserve(nbytes):
            return None
        block = Block(self.new_address(nbytes), nbytes, pool, stream)
        self.segments.append(("alloc", block.ptr, nbytes, stream))
        return block

    def _passes_cap(self, nbytes: int) -> bool:
        return self._cap_bytes is not None and not self._granted(nbytes, self._cap_bytes)

    def _granted(self, nbytes: int, limit_bytes: int) -> bool:
        asked = self.reserved_bytes + nbytes
        if asked > limit_bytes:
            self.refused_bytes = min(self.refused_bytes, asked)
            return False
        self.granted_bytes = max(self.granted_bytes, asked)
        return True

    def _out_of_memory(self, size: int, nbytes: int) -> OutOfMemory:
        limit_bytes = _lowest(self.limit_bytes, self._cap_bytes) or 0
        return OutOfMemory(nbytes, self.allocated_bytes, self.reserved_bytes, limit_bytes, self.segment_bytes(size))

    def new_address(self, nbytes: int) -> int:
        return self._addresses.new(nbytes)

    def reserve(self, nbytes: int) -> bool:
        """Count bytes from the driver (cudaMalloc, cuMemCreate); False where it has no more."""
        if self.physical and self.limit_bytes is not None and not self._granted(nbytes, self.limit_bytes):
            return False
        self.reserved_bytes += nbytes
        self.num_device_alloc += 1
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return True

    def merge(self, block: Block, other: Block | None) -> None:
        """try_merge_blocks: join a free neighbour with the same mapping."""
        if other is None or other.used or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.remove(other)
        elif self._expandable is not None:
            self._expandable.forget(other)
        block.absorb(other)

    def _release(self, block: Block) -> None:
        """release_block: a free block that is a whole segment goes back to the driver."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self.num_device_free += 1
        self.segments.append(("free", block.ptr, block.size, block.stream))

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """release_available_cached_blocks: with max_split_size_mb, as many oversize blocks of the stream as the request
        needs, whole segments, since they are never split."""
        if self.settings.max_split_is_unlimited or self._expandable is not None:
            return False
        wanted = max(size, self.settings.max_split_bytes)
        position = pool.at_least(wanted, stream)
        if position is not None:
            self._release(pool.at(position))
            return True
        released = 0
        for block in reversed([block for block in pool.all() if block.stream == stream]):
            if released >= wanted or block.size < self.settings.max_split_bytes:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """garbage_collect_cached_blocks: above the threshold, free whole segments of at least average age go. Age is
        the number of searches in the large pool since the block became free. Expandable pages never go."""
        if self._cap_bytes is None or self._expandable is not None:
            return
        target = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._cap_bytes)
        if target <= 0:
            return
        now, reclaimed = self.large.searches, 0
        candidates = [b for b in self.large.all() if not b.is_split and b.stream < GRAPH_POOL]
        while reclaimed < target and candidates:
            average = sum(now - block.freed_at for block in candidates) / len(candidates)
            # Not only until the target is reached: PyTorch does not want to be back here soon.
            for block in candidates:
                if now - block.freed_at >= average:
                    reclaimed += block.size
                    self._release(block)
            candidates = [block for block in candidates if now - block.freed_at < average]
