"""The allocator simulator on several streams: rules by hand, and programs that PyTorch's CUDA build ran.

tests/data/streams.json was written by `python -m tests.cuda_build.streams`.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from foretrain.base.units import MIB
from foretrain.predict.allocator.blocks import Block
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory
from tests.kit.command import REPO
from tests.kit.lifetimes import Event, replayed
from tests.kit.stream_programs import WAYS, Program, differences, simulate

KEPT = REPO / "tests" / "data" / "streams.json"


def take(allocator: Allocator, nbytes: int, stream: int = 0) -> Block:
    block = allocator.malloc(nbytes, stream)
    assert block is not None
    return block


@cache
def recordings() -> list[tuple[Program, dict[str, Any]]]:
    found = []
    for each in json.loads(KEPT.read_text("utf-8")):
        events = [tuple(event) for event in each["program"]["events"]]
        found.append((Program(**{**each["program"], "events": events}), each["measured"]))
    return found


def simulated(program: Program, measured: dict[str, Any]) -> list[str]:
    return differences(simulate(program, measured["memory_bytes"], measured["free_bytes"]), measured)


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_the_simulator_does_what_the_cuda_build_did(number: int) -> None:
    program, measured = recordings()[number]
    assert (program.settings, program.memory_mib, program.fraction) == WAYS[number]
    assert simulated(program, measured) == []


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_the_recordings_tell_streams_apart(number: int) -> None:
    program, measured = recordings()[number]
    as_one = [event for event in program.events if event[0] != "stream"]
    assert any(found.startswith("segments") for found in simulated(replace(program, events=as_one), measured))
    unrecorded = [event for event in program.events if event[0] != "record_stream"]
    assert any(found.startswith("active") for found in simulated(replace(program, events=unrecorded), measured))


def test_free_memory_serves_its_own_stream_only() -> None:
    allocator = Allocator()
    first = take(allocator, 30 * MIB)
    allocator.free(first)
    other = take(allocator, 30 * MIB, stream=1)
    assert other.ptr != first.ptr
    assert allocator.reserved_bytes == 60 * MIB
    assert take(allocator, 30 * MIB).ptr == first.ptr
    allocator.free(other)
    assert take(allocator, 30 * MIB, stream=1).ptr == other.ptr
    assert allocator.reserved_bytes == 60 * MIB


def test_the_rest_of_a_split_block_stays_with_its_stream() -> None:
    allocator = Allocator()
    take(allocator, 1000, stream=3)
    take(allocator, 1000)
    assert allocator.reserved_bytes == 4 * MIB
    take(allocator, 1000, stream=3)
    assert allocator.reserved_bytes == 4 * MIB


def test_block_of_another_stream_comes_back_at_next_request() -> None:
    allocator = Allocator()
    block = take(allocator, 30 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == stats["requested_bytes.all.current"] == 30 * MIB
    allocator.reset_peak()
    assert allocator.memory_stats()["active_bytes.all.peak"] == 30 * MIB
    assert take(allocator, 30 * MIB).ptr == block.ptr  # it is there before the request is looked for
    assert allocator.memory_stats()["active_bytes.all.current"] == 30 * MIB


def test_recording_the_own_stream_changes_nothing() -> None:
    allocator = Allocator()
    block = take(allocator, 30 * MIB, stream=2)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert allocator.active_bytes == 0
    allocator.record_stream(None, 1)
    with pytest.raises(ValueError, match="not in use"):
        allocator.record_stream(block, 1)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)


def test_a_pending_block_is_freed_once() -> None:
    allocator = Allocator()
    block = take(allocator, 30 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)


@pytest.mark.parametrize("way", ["", "expandable_segments:True"])
def test_emptying_the_cache_gives_back_the_memory_of_all_streams(way: str) -> None:
    allocator = Allocator(Settings.parse(way))
    blocks = [take(allocator, 30 * MIB, stream) for stream in range(3)]
    allocator.record_stream(blocks[0], 1)
    for block in blocks:
        allocator.free(block)
    assert allocator.reserved_bytes >= 90 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.active_bytes == 0


@pytest.mark.parametrize("way", ["", "expandable_segments:True"])
def test_a_request_can_have_the_memory_that_another_stream_keeps(way: str) -> None:
    allocator = Allocator(Settings.parse(way), limit_bytes=100 * MIB, physical=True)
    allocator.free(take(allocator, 60 * MIB, stream=1))
    take(allocator, 60 * MIB)
    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 60 * MIB)


def test_oversize_blocks_of_another_stream_wait_for_the_retry() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:24"), limit_bytes=100 * MIB, physical=True)
    allocator.free(take(allocator, 60 * MIB, stream=1))
    take(allocator, 60 * MIB)
    assert allocator.num_alloc_retries == 1
    allocator = Allocator(Settings.parse("max_split_size_mb:24"), limit_bytes=100 * MIB, physical=True)
    for block in [take(allocator, 48 * MIB, stream) for stream in (1, 1)]:
        allocator.free(block)
    take(allocator, 90 * MIB, stream=1)
    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (0, 90 * MIB)


def test_expandable_segments_belong_to_streams() -> None:
    allocator = Allocator(Settings.parse("expandable_segments:True"))
    blocks = [take(allocator, 20 * MIB, stream) for stream in (0, 1, 0, 1)]
    assert blocks[2].ptr - blocks[0].ptr == blocks[3].ptr - blocks[1].ptr == 20 * MIB
    assert abs(blocks[1].ptr - blocks[0].ptr) > 1 << 30


def test_events_name_their_stream() -> None:
    events = [
        Event("alloc", "a", 30 * MIB),
        Event("record_stream", "a", 1),
        Event("free", "a"),
        Event("stream", 1),
        Event("alloc", "b", 30 * MIB),
        Event("stream", 0),
        Event("alloc", "c", 30 * MIB),
    ]
    result = replayed(events)
    assert result.stats["reserved_bytes.all.current"] == result.stats["allocated_bytes.all.current"] == 60 * MIB


def test_a_refused_request_leaves_the_other_streams_blocks() -> None:
    allocator = Allocator(limit_bytes=100 * MIB)
    take(allocator, 60 * MIB, stream=1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MIB)
    assert allocator.allocated_bytes == 60 * MIB
