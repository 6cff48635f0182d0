"""Traces of code with side streams, held to what PyTorch's CUDA build allocated and reserved for the same code."""

import json

import pytest
import torch

from foretrain.base.units import MIB
from foretrain.predict.allocator.blocks import Block, Lifetimes
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.simulator import Allocator
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.session import Tracing, trace
from tests.kit.stream_steps import STEPS

# As `python -m tests.cuda_build.streams --step NAME` prints them: peaks, and what the driver was asked for, in MiB.
MEASURED = {
    "prefetching": (415_565_312, 492_830_720, [16, 2, 16, 20, 16, 32, 20, 32, 20, 20, 32, 16, 36, 64, 64, 64]),
    "two_branches": (336_069_632, 446_693_376, [16, 16, 32, 32, 20, 32, 32, 32, 20, 32, 2, 32, 32, 32, 32, 32]),
    "gathering": (105_120_768, 148_897_792, [20, 20, 20, 20, 20, 2, 20, 20]),
}


@pytest.mark.parametrize("name", STEPS)
def test_side_streams_take_what_they_take_in_the_cuda_build(name: str) -> None:
    found = trace(lambda on: STEPS[name]())
    segments: list[int] = []

    def watch(position: int, allocator: Allocator, block: Block | None) -> None:
        segments[:] = [nbytes // MIB for _, _, nbytes, _ in allocator.segments]

    replay(found.trace, watch=watch)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes, segments) == MEASURED[name]
    assert found.notes == ()
    as_one = Lifetimes(found.trace.events, found.trace.sizes, found.trace.phases)
    assert replay(as_one).peak_reserved_bytes < MEASURED[name][1]


def test_a_trace_keeps_its_streams_and_reads_older_ones() -> None:
    def code(on: Tracing) -> None:
        side = torch.cuda.Stream()
        assert side != torch.cuda.current_stream() == torch.cuda.default_stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            batch = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        batch.record_stream(torch.cuda.current_stream())
        del batch
        stats = torch.cuda.memory_stats()
        assert (stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]) == (0, 64 * MIB)
        torch.cuda.set_stream(side)
        torch.empty(8, device="cuda")

    found = trace(code).trace
    assert [(a.stream, a.used_on) for a in found.allocations] == [(1, (0,)), (1, ())]
    data = json.loads(json.dumps(found.to_json()))
    assert Trace.from_json(data) == found
    del data["streams"]
    assert [(a.stream, a.used_on) for a in Trace.from_json(data).allocations] == [(0, ()), (0, ())]
