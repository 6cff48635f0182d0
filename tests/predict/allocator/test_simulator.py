"""The allocator's simulator against numbers worked out by hand from CUDACachingAllocator.cpp, and against what must
hold for any program."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.predict import software
from foretrain.predict.allocator.blocks import Block, Falling, Rising
from foretrain.predict.allocator.replay import Tried, replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory
from tests.kit.lifetimes import Event, Played, lifetimes_of, played, replayed

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EXPANDABLE = Settings(expandable_segments=True)


def take(allocator: Allocator, nbytes: int, stream: int = 0) -> Block:
    block = allocator.malloc(nbytes, stream)
    assert block is not None
    return block


# -- addresses ---------------------------------------------------------------------------------------------


def test_segments_rise() -> None:
    rising = Rising()
    first = rising.new(20 * MIB)
    assert [rising.new(size * MIB) - first for size in (2, 100, 26)] == [20 * MIB, 22 * MIB, 122 * MIB]


def test_linux_fills_chunks_of_32_mib_that_fall() -> None:
    """100 and 26 MiB share 128 MiB, and two of 2 MiB lie behind 20: as in the snapshot that the class names."""
    falling = Falling()
    first = falling.new(20 * MIB)
    assert first % (32 * MIB) == 0
    found = [falling.new(size * MIB) - first for size in (100, 26, 20, 2, 2, 12, 14)]
    assert [where // MIB for where in found] == [-128, -28, -160, -140, -138, 20, -192]


@settings(deadline=None)
@given(st.lists(st.integers(1, 200 * MIB), max_size=60))
def test_falling_segments_never_overlap_and_lie_as_low_as_can_be(sizes: list[int]) -> None:
    falling = Falling()
    taken: list[tuple[int, int]] = []  # (address, end)
    for nbytes in sizes:
        size = -(-nbytes // (2 * MIB)) * 2 * MIB
        lowest = min((address for address, _ in taken), default=None)
        ends = {end for _, end in taken if end % (32 * MIB)}  # where a chunk has something left
        starts = {address for address, _ in taken}
        room = [end for end in ends - starts if end + size <= -(-end // (32 * MIB)) * 32 * MIB]
        address = falling.new(nbytes)
        if room:
            assert address == min(room)
        elif lowest is not None:
            assert address == lowest // (32 * MIB) * 32 * MIB - -(-size // (32 * MIB)) * 32 * MIB
        taken.append((address, address + size))
    for before, after in pairwise(sorted(taken)):
        assert before[1] <= after[0]


def test_expandable_stretches_may_lie_below_one_another() -> None:
    """Each stream has one: each is unmapped as itself."""
    allocator = Allocator(EXPANDABLE, addresses=Falling())
    blocks = [take(allocator, 30 * MIB, stream) for stream in (0, 7, 9)]
    assert blocks[2].ptr < blocks[1].ptr < blocks[0].ptr
    for block in (blocks[1], blocks[0], blocks[2]):
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.live_segments()) == (0, [])


def test_the_addresses_decide_which_of_two_free_blocks_is_taken() -> None:
    """Two blocks of one size are free; the one in the later segment is the lower one where addresses fall."""
    lower = []
    for addresses in (Rising(), Falling()):
        allocator = Allocator(addresses=addresses)
        blocks = [take(allocator, 64 * MIB) for _ in range(2)]
        pointers = [block.ptr for block in blocks]
        for block in blocks:
            allocator.free(block)
        lower.append(pointers.index(take(allocator, 64 * MIB).ptr))
    assert lower == [0, 1]


@pytest.mark.parametrize(("torch", "taken"), [("2.11.0+cu130", 2), ("2.12.0+cu130", 0), ("2.13.0+cu130", 0)])
def test_torch_version_decides_between_age_and_address(monkeypatch: pytest.MonkeyPatch, torch: str, taken: int) -> None:
    """As the CUDA builds of these versions did where addresses fall: of three free segments of 64 MiB, the one that
    comes first, the others following by age or by address."""
    monkeypatch.setattr(software, "installed", lambda: software.parse(torch))
    allocator = Allocator()
    blocks = [take(allocator, 64 * MIB) for _ in range(3)]
    pointers = [block.ptr for block in blocks]
    for i in (1, 2, 0):
        allocator.free(blocks[i])
    found = [pointers.index(take(allocator, 64 * MIB).ptr) for _ in range(3)]
    assert found == ([2, 1, 0] if taken else [0, 1, 2])


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(asked: int, rounded: int) -> None:
    allocator = Allocator()
    assert allocator.round(asked) == rounded
    take(allocator, asked)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (asked, rounded)


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_are_2_and_20_mib_or_rounded_to_2_mib(asked: int, segment: int) -> None:
    allocator = Allocator()
    take(allocator, asked)
    assert allocator.reserved_bytes == segment


def test_nothing_takes_nothing_and_less_is_an_error() -> None:
    allocator = Allocator()
    assert allocator.malloc(0) is None
    allocator.free(None)
    assert allocator.reserved_bytes == 0
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.malloc(-1)


def test_large_segments_can_have_another_size() -> None:
    allocator = Allocator(Settings(large_segment_bytes=12 * MIB))
    take(allocator, 2 * MIB)
    assert allocator.reserved_bytes == 12 * MIB
    take(allocator, 10 * MIB)  # exactly what is left; a request of 10 MiB would otherwise have its own segment
    assert allocator.reserved_bytes == 12 * MIB


# The comment above roundup_power2_next_division: 1200 with 4 divisions between 1024 and 2048 becomes 1280.
@pytest.mark.parametrize(
    ("divisions", "asked", "rounded"),
    [
        (4, 1200 * KIB, 1280 * KIB),
        (4, 1280 * KIB, 1280 * KIB),
        (4, 1024 * KIB, 1024 * KIB),
        (4, 1281 * KIB, 1536 * KIB),
        (4, 2048, 2048),  # not above 4 x 512: rounded to 512 only
        (4, 1025, 1536),
        (4, 2049, 2560),
        (4, 5000, 5120),  # above it, also below 1 MiB: steps of 4096 / 4
        (1, 1200 * KIB + 1, 1200 * KIB + 512),
    ],
)
def test_roundup_power2_divisions(divisions: int, asked: int, rounded: int) -> None:
    allocator = Allocator(Settings.parse(f"roundup_power2_divisions:{divisions}"))
    assert allocator.round(asked) == rounded


# -- finding, splitting, merging ---------------------------------------------------------------------------


def test_small_blocks_split_down_to_512_bytes() -> None:
    allocator = Allocator()
    blocks = [take(allocator, 512) for _ in range(4096)]
    assert allocator.reserved_bytes == 2 * MIB
    assert [block.ptr - blocks[0].ptr for block in blocks] == [512 * i for i in range(4096)]
    take(allocator, 1)
    assert allocator.reserved_bytes == 4 * MIB


def test_large_blocks_split_only_where_more_than_1_mib_is_left() -> None:
    allocator = Allocator()
    assert take(allocator, 19 * MIB).size == 20 * MIB  # its own segment of 20 MiB, of which exactly 1 MiB is left
    allocator = Allocator()
    assert take(allocator, 19 * MIB - 512).size == 19 * MIB - 512
    assert allocator.large.at(0).size == MIB + 512


def test_best_fit_is_the_smallest_block_at_the_lowest_address() -> None:
    allocator = Allocator(addresses=Falling())
    sizes = [40 * MIB, 30 * MIB, 50 * MIB, 30 * MIB]
    blocks = [take(allocator, nbytes) for nbytes in sizes]
    addresses = [block.ptr for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert addresses[3] < addresses[1]  # new segments fall
    assert take(allocator, 30 * MIB).ptr == addresses[3]
    assert take(allocator, 30 * MIB).ptr == addresses[1]
    assert take(allocator, 31 * MIB).ptr == addresses[0]


def test_free_neighbours_merge_and_the_segment_stays_reserved() -> None:
    allocator = Allocator()
    first, second, third = (take(allocator, 5 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert [block.size for block in allocator.large.all()] == [5 * MIB, 10 * MIB]  # third and the rest behind it
    allocator.free(second)
    assert [block.size for block in allocator.large.all()] == [20 * MIB]
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 20 * MIB)


def test_pools_do_not_serve_each_other() -> None:
    allocator = Allocator()
    allocator.free(take(allocator, 10 * MIB))
    take(allocator, 512)
    assert allocator.reserved_bytes == 12 * MIB


def test_a_block_is_freed_once() -> None:
    allocator = Allocator()
    block = take(allocator, 512)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)


def test_empty_cache_gives_whole_free_segments_back() -> None:
    allocator = Allocator()
    kept, freed, small = take(allocator, 2 * MIB), take(allocator, 30 * MIB), take(allocator, 512)
    assert allocator.reserved_bytes == 52 * MIB
    allocator.free(freed)
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB  # what `kept` stands in
    assert [entry[0] for entry in allocator.segments] == ["alloc", "alloc", "alloc", "free", "free"]
    assert [entry[2] for entry in allocator.segments[3:]] == [30 * MIB, 2 * MIB]  # the large pool first
    allocator.free(kept)


# -- max_split_size ----------------------------------------------------------------------------------------


def test_oversize_blocks_serve_oversize_requests_only() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:32"))
    allocator.free(take(allocator, 40 * MIB))
    take(allocator, 31 * MIB)
    assert allocator.reserved_bytes == 72 * MIB  # 40 stay cached, 32 are new
    assert take(allocator, 36 * MIB).size == 40 * MIB  # not split: the request is oversize itself
    assert allocator.reserved_bytes == 72 * MIB


def test_a_block_of_exactly_the_split_limit_is_oversize() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:32"))
    allocator.free(take(allocator, 32 * MIB))
    take(allocator, 31 * MIB)
    assert allocator.reserved_bytes == 64 * MIB


def test_an_oversize_request_leaves_a_block_that_is_much_larger() -> None:
    for text, reserved in (("", 132), (",max_non_split_rounding_mb:69", 100), (",max_non_split_rounding_mb:68", 132)):
        allocator = Allocator(Settings.parse("max_split_size_mb:32" + text))
        allocator.free(take(allocator, 100 * MIB))
        take(allocator, 32 * MIB)
        assert allocator.reserved_bytes == reserved * MIB, text


def test_oversize_blocks_are_released_before_other_blocks() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:32"), limit_bytes=150 * MIB)
    for block in [take(allocator, nbytes * MIB) for nbytes in (24, 40, 60)]:
        allocator.free(block)
    take(allocator, 90 * MIB)  # no single block is large enough: the largest go until 90 MiB are free: 60, then 40
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (114 * MIB, 0)
    allocator = Allocator(Settings.parse("max_split_size_mb:32"), limit_bytes=150 * MIB)
    for block in [take(allocator, nbytes * MIB) for nbytes in (30, 40, 70)]:
        allocator.free(block)
    take(allocator, 34 * MIB)  # fits within the rounding of 20 MiB
    take(allocator, 38 * MIB)  # 70 is too much larger to be used, but is the one block that makes room
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (108 * MIB, 0)


def test_no_more_oversize_blocks_go_than_the_request_needs() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:32"), limit_bytes=150 * MIB)
    for block in [take(allocator, nbytes * MIB) for nbytes in (36, 40, 60)]:
        allocator.free(block)
    take(allocator, 100 * MIB)  # 60 and 40 are just enough
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (136 * MIB, 0)


def test_oversize_blocks_that_do_not_suffice_go_with_the_cache() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:32"), limit_bytes=100 * MIB)
    take(allocator, 10 * MIB)
    for block in [take(allocator, nbytes * MIB) for nbytes in (24, 40)]:
        allocator.free(block)
    take(allocator, 50 * MIB)  # without 40 there would be room, yet PyTorch does not try before it released all
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (60 * MIB, 1)


# -- limits ------------------------------------------------------------------------------------------------


def test_cache_is_released_at_the_limit_and_request_retried() -> None:
    allocator = Allocator(limit_bytes=100 * MIB)
    allocator.free(take(allocator, 60 * MIB))
    take(allocator, 70 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (70 * MIB, 70 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms, allocator.num_device_free) == (1, 0, 1)


@pytest.mark.parametrize("physical", [False, True])
def test_split_segments_stay_and_the_error_has_the_numbers(physical: bool) -> None:
    allocator = Allocator(limit_bytes=100 * MIB, physical=physical)
    whole = take(allocator, 60 * MIB)
    allocator.free(whole)
    kept = take(allocator, 10 * MIB)  # splits the 60
    with pytest.raises(OutOfMemory, match=str(61 * MIB)) as caught:
        allocator.malloc(61 * MIB)
    error = caught.value
    assert (error.requested_bytes, error.segment_bytes, error.limit_bytes) == (61 * MIB, 62 * MIB, 100 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (10 * MIB, 60 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 1)
    allocator.free(kept)
    take(allocator, 61 * MIB)  # life goes on after it


def test_throw_on_cudamalloc_oom_leaves_the_cache_alone() -> None:
    allocator = Allocator(Settings.parse("throw_on_cudamalloc_oom:True"), limit_bytes=100 * MIB)
    allocator.free(take(allocator, 60 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(70 * MIB)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries, allocator.num_oom_rejections) == (60 * MIB, 0, 1)


def test_garbage_collection_takes_the_older_half_by_searches() -> None:
    allocator = Allocator(Settings.parse("garbage_collection_threshold:0.5"), limit_bytes=200 * MIB)
    blocks = [take(allocator, nbytes * MIB) for nbytes in (20, 30, 40)]
    allocator.free(blocks[0])  # all three searches lie before; from here on each search makes it older by one
    take(allocator, 50 * MIB)  # 90 reserved is below 100: no collection
    allocator.free(blocks[1])
    assert allocator.reserved_bytes == 140 * MIB
    take(allocator, 60 * MIB)  # ages 2 and 1, average 1.5: only the first goes, and then the second of average age
    assert [entry[2] // MIB for entry in allocator.segments if entry[0] == "free"] == [20, 30]
    assert allocator.reserved_bytes == 150 * MIB


@pytest.mark.parametrize(("physical", "freed"), [(False, [60]), (True, [])])
def test_garbage_collection_stops_at_enough_and_needs_a_cap(physical: bool, freed: list[int]) -> None:
    allocator = Allocator(Settings.parse("garbage_collection_threshold:0.5"), 200 * MIB, physical=physical)
    old, young, busy = (take(allocator, nbytes * MIB) for nbytes in (60, 30, 20))
    allocator.free(old)
    allocator.free(busy)
    take(allocator, 20 * MIB)  # found in the cache; `old` is one search older now
    allocator.free(young)
    take(allocator, 70 * MIB)  # 110 reserved, 10 above the threshold; ages 2 and 1, average 1.5
    assert [entry[2] // MIB for entry in allocator.segments if entry[0] == "free"] == freed


# -- expandable segments -----------------------------------------------------------------------------------


def test_expandable_segments_map_2_and_20_mib_pages_side_by_side() -> None:
    allocator = Allocator(EXPANDABLE)
    first = take(allocator, 512)
    assert allocator.reserved_bytes == 2 * MIB
    large = take(allocator, 25 * MIB)
    assert allocator.reserved_bytes == 42 * MIB  # two pages of 20 MiB
    assert take(allocator, 15 * MIB).ptr == large.ptr + 25 * MIB  # the rest of them
    assert take(allocator, MIB + 512).ptr == large.ptr + 40 * MIB
    assert [(kind, nbytes // MIB) for kind, _, nbytes, _ in allocator.segments] == [
        ("map", 2),
        ("map", 40),
        ("map", 20),
    ]
    allocator.free(first)


def test_expandable_blocks_grow_into_the_pages_behind_them() -> None:
    allocator = Allocator(EXPANDABLE)
    first = take(allocator, 20 * MIB)
    start = first.ptr
    allocator.free(first)
    assert take(allocator, 50 * MIB).ptr == start  # 20 free MiB and 40 new ones
    assert (allocator.reserved_bytes, allocator.segments[-1][2]) == (60 * MIB, 40 * MIB)


def test_expandable_best_fit_prefers_what_cannot_grow() -> None:
    allocator = Allocator(EXPANDABLE)
    first, _, last = take(allocator, 30 * MIB), take(allocator, 2 * MIB), take(allocator, 8 * MIB)
    hole, tail = first.ptr, last.ptr
    allocator.free(first)
    allocator.free(last)  # 8 MiB, smaller than the hole, but it can grow without end
    assert take(allocator, 4 * MIB).ptr == hole
    assert take(allocator, 8 * MIB).ptr == hole + 4 * MIB
    assert tail > hole


def test_expandable_segments_unmap_pages_and_fill_the_gap() -> None:
    allocator = Allocator(EXPANDABLE, limit_bytes=100 * MIB, physical=True)
    first, second = take(allocator, 50 * MIB), take(allocator, 30 * MIB)
    start = first.ptr
    allocator.free(first)
    allocator.empty_cache()
    # 50 MiB are free; the pages 0-20 and 20-40 are whole, of the third 10 MiB are free and stay.
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.segments[-1] == ("unmap", start, 40 * MIB, 0)
    assert take(allocator, 45 * MIB).ptr == start
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(second)
    assert take(allocator, 55 * MIB).ptr == start + 45 * MIB  # 35 free, one page more: the limit, no retry needed
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (100 * MIB, 0)
    with pytest.raises(OutOfMemory):
        allocator.malloc(2 * MIB)


def test_a_cap_is_asked_in_segments_even_where_pages_are_mapped() -> None:
    allocator = Allocator(EXPANDABLE, limit_bytes=16 * MIB)
    take(allocator, 15 * MIB)  # alloc_block asks for 16 MiB, a page of 20 MiB is mapped: PyTorch lets that pass
    assert allocator.reserved_bytes == 20 * MIB
    with pytest.raises(OutOfMemory):
        Allocator(EXPANDABLE, limit_bytes=16 * MIB, physical=True).malloc(15 * MIB)


def test_a_wholly_unmapped_stretch_begins_anew() -> None:
    allocator = Allocator(EXPANDABLE)
    for block in [take(allocator, 30 * MIB), take(allocator, 512)]:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.live_segments()) == (0, [])
    take(allocator, 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


# -- statistics and events ---------------------------------------------------------------------------------


def test_a_request_beyond_a_stretch_has_one_of_its_own() -> None:
    """Plans of absurd batches ask for more than 2 TiB at once; addresses must still tell the stretches apart."""
    allocator = Allocator(EXPANDABLE)
    first = take(allocator, 30 * MIB)
    huge = take(allocator, 3 << 40)
    allocator.free(first)
    allocator.free(huge)
    check(allocator)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    with pytest.raises(OutOfMemory):
        Allocator(EXPANDABLE, 12 * GIB, physical=True).malloc(3 << 40)


@pytest.mark.parametrize("physical", [True, False])
def test_a_cap_beside_a_limit(physical: bool) -> None:
    """per_process_memory_fraction on a card that others use too: the lower of both counts, and is named."""
    for limit, cap in ((60 * MIB, 40 * MIB), (40 * MIB, 60 * MIB)):
        allocator = Allocator(limit_bytes=limit, physical=physical, cap_bytes=cap)
        take(allocator, 30 * MIB)
        with pytest.raises(OutOfMemory) as caught:
            allocator.malloc(20 * MIB)
        assert caught.value.limit_bytes == 40 * MIB
    # Garbage collection counts from the cap, which a limit alone is not.
    allocator = Allocator(Settings(garbage_collection_threshold=0.5), 1000 * MIB, physical=True, cap_bytes=100 * MIB)
    allocator.free(take(allocator, 60 * MIB))
    take(allocator, 70 * MIB)
    assert allocator.reserved_bytes == 70 * MIB


def test_statistics_have_the_names_of_torch() -> None:
    allocator = Allocator(limit_bytes=GIB)
    block = take(allocator, 1000)
    take(allocator, 3 * MIB)
    allocator.free(block)
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.current"] == stats["active_bytes.all.current"] == 3 * MIB
    assert stats["allocated_bytes.all.peak"] == 3 * MIB + 1024
    assert (stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]) == (3 * MIB, 3 * MIB + 1000)
    assert stats["reserved_bytes.all.current"] == stats["reserved_bytes.all.peak"] == 22 * MIB
    allocator.reset_peak()
    assert allocator.memory_stats()["allocated_bytes.all.peak"] == 3 * MIB


def test_replay_has_phases_a_curve_and_the_peaks_of_the_whole() -> None:
    events = [
        Event("alloc", "w", 4 * MIB),
        Event("phase", "forward"),
        Event("alloc", "a", 30 * MIB),
        Event("phase", "backward"),
        Event("free", "a"),
        Event("alloc", "g", 2 * MIB),
        Event("phase", "nothing happens"),
        Event("phase", "forward"),
        Event("empty_cache"),
        Event("phase", "evaluation"),
        Event("free", "g"),
    ]
    found = played(events)
    result = found.replay
    assert [(each.phase, each.allocated_bytes, each.reserved_bytes) for each in result.phases] == [
        ("", 4 * MIB, 20 * MIB),
        ("forward", 34 * MIB, 50 * MIB),
        ("backward", 34 * MIB, 50 * MIB),
        ("nothing happens", 6 * MIB, 20 * MIB),
        ("evaluation", 6 * MIB, 20 * MIB),
    ]
    assert [each.position for each in result.phases] == [0, 1, 1, 3, 3]
    assert [n // MIB for n in found.allocated_bytes] == [4, 34, 4, 6, 6, 4]
    assert [n // MIB for n in found.reserved_bytes] == [20, 50, 50, 50, 20, 20]
    assert (result.stats["allocated_bytes.all.peak"], result.stats["reserved_bytes.all.peak"]) == (34 * MIB, 50 * MIB)
    assert result.survives


def test_replay_ends_where_the_limit_is() -> None:
    result = replayed([("alloc", 1, 30 * MIB), ("alloc", 2, 30 * MIB), ("free", 1, 0)], limit_bytes=40 * MIB)
    assert (result.failure.position, result.failure.phase) == (1, "")
    assert (result.failure.requested_bytes, result.failure.allocated_bytes) == (30 * MIB, 30 * MIB)


# -- what holds for any program ----------------------------------------------------------------------------

sizes = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 40).map(lambda n: n * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 100 * MIB]),
)
# A program: each number above 0 asks for that much, each other one frees the live block at that index.
programs = st.lists(st.one_of(sizes, sizes, st.integers(-1000, -1)), max_size=60)
ways = st.sampled_from(
    [
        Settings(),
        EXPANDABLE,
        Settings.parse("max_split_size_mb:24"),
        Settings.parse("roundup_power2_divisions:4"),
        Settings.parse("max_split_size_mb:24,expandable_segments:True,large_segment_size_mb:12"),
    ]
)
collecting = Settings.parse("garbage_collection_threshold:0.5,max_split_size_mb:32")


def events_of(program: list[int]) -> list[tuple[str, int, int]]:
    live: list[int] = []
    events = []
    for id, number in enumerate(program):
        if number >= 0:
            live.append(id)
            events.append(("alloc", id, number))
        elif live:
            events.append(("free", live.pop(number % len(live)), 0))
    return events


def check(allocator: Allocator) -> None:
    """Blocks cover their segments without gap or overlap, no two free ones touch, and the sums are right."""
    segments = allocator.live_segments()
    end = 0
    used = free = 0
    for blocks in segments:
        assert blocks[0].ptr >= end
        for before, after in pairwise(blocks):
            assert before.ptr + before.size == after.ptr
            assert before.next is after
            assert after.prev is before
            assert before.used or after.used
        end = blocks[-1].ptr + blocks[-1].size
        used += sum(block.size for block in blocks if block.used)
        free += sum(block.size for block in blocks if not block.used)
    assert used == allocator.allocated_bytes
    assert used + free == allocator.reserved_bytes
    assert allocator.requested_bytes == sum(block.requested for block in allocator.active.values())
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert free == sum(block.size for pool in (allocator.small, allocator.large) for block in pool.all())
    signs = {"alloc": 1, "map": 1, "free": -1, "unmap": -1}
    assert sum(signs[kind] * nbytes for kind, _, nbytes, _ in allocator.segments) == allocator.reserved_bytes


def facts(found: Played) -> tuple[object, ...]:
    result = found.replay
    return result.stats, found.allocated_bytes, found.reserved_bytes, result.allocator.segments, result.failure


@settings(deadline=None)
@given(programs, st.one_of(ways, st.just(collecting)), st.one_of(st.none(), st.integers(20, 300)), st.booleans())
def test_blocks_cover_segments_and_the_sums_are_right(
    program: list[int], way: Settings, limit_mib: int | None, physical: bool
) -> None:
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    allocator = Allocator(way, limit_bytes, physical=physical)
    alive: dict[int, Block | None] = {}
    page = way.large_segment_bytes if way.expandable_segments and not physical else 0
    for kind, id, nbytes in events_of(program):
        if kind == "free":
            allocator.free(alive.pop(id, None))
        else:
            try:
                alive[id] = allocator.malloc(nbytes)
            except OutOfMemory as error:
                assert error.reserved_bytes == allocator.reserved_bytes
        check(allocator)
        assert limit_bytes is None or allocator.peak_reserved_bytes <= limit_bytes + page


@settings(deadline=None)
@given(programs, ways)
def test_freeing_everything_leaves_each_segment_one_free_block(program: list[int], way: Settings) -> None:
    result = replayed(events_of(program), way)
    allocator = result.allocator
    for block in list(allocator.active.values()):
        allocator.free(block)
    check(allocator)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (0, 0)
    assert all(len(blocks) == 1 for blocks in allocator.live_segments())
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.live_segments()) == (0, [])


@settings(deadline=None)
@given(programs, ways, st.integers(0, 100 * MIB))
def test_a_limit_that_is_never_reached_changes_nothing(program: list[int], way: Settings, spare_bytes: int) -> None:
    events = events_of(program)
    free = played(events, way)
    limit_bytes = free.replay.stats["reserved_bytes.all.peak"] + spare_bytes
    assert facts(played(events, way, limit_bytes, physical=True)) == facts(free)
    if not way.expandable_segments:  # a cap is asked in segments where pages would be mapped, so it may bite earlier
        assert facts(played(events, way, limit_bytes)) == facts(free)


@settings(deadline=None)
@given(
    programs, st.one_of(ways, st.just(collecting)), st.lists(st.integers(0, 300 * MIB), min_size=2, max_size=12),
    st.booleans(),
)  # fmt: skip
def test_replay_of_one_limit_tells_what_others_replay(
    program: list[int], way: Settings, limits: list[int], physical: bool
) -> None:
    lifetimes, _ = lifetimes_of(events_of(program))
    tried = Tried(lifetimes, way, physical=physical)
    for limit_bytes in limits:
        assert tried.failure(limit_bytes) == replay(lifetimes, way, limit_bytes, physical=physical).failure


@settings(deadline=None)
@given(programs, ways)
def test_phases_cut_the_peak_and_lose_nothing(program: list[int], way: Settings) -> None:
    events = events_of(program)
    cut = [step for i, event in enumerate(events) for step in ((("phase", f"p{i % 3}", 0), event))]
    whole, result = replayed(events, way), replayed(cut, way)
    assert result.stats == whole.stats
    assert max((p.allocated_bytes for p in result.phases), default=0) == whole.stats["allocated_bytes.all.peak"]
    assert max((p.reserved_bytes for p in result.phases), default=0) == whole.stats["reserved_bytes.all.peak"]
