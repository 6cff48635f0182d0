"""What a step takes that is replayed as one CUDA graph: the estimate beside the trace, which runs the recording itself.

That the trace is right was seen beside PyTorch's CUDA build (tests/cuda_build/trainer.py) and an H100 (docs/trust.md).
"""

from typing import Any

import pytest
import torch

from foretrain.base.units import MIB
from foretrain.config.options import RunConfig
from foretrain.model.graphed import WARM_STEPS
from foretrain.model.step import build, train_step
from foretrain.predict.allocator.blocks import GRAPH_POOL
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.simulator import Allocator
from foretrain.predict.memory import predict
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import self_test
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.service import Request
from tests.kit.kernels import learnable_batches
from tests.kit.techniques import GPU, REFERENCE
from tests.kit.tiny import tiny

PHASES = ("evaluate_first", "first_step", "steady_step", "evaluate_steady")


def spec_of(*, compiled: bool = False, **changes: Any) -> StepSpec:
    return StepSpec.of(config_of(**changes), GPU, dtype="bfloat16", compiled=compiled)


def config_of(**changes: Any) -> RunConfig:
    return REFERENCE.model_copy(update={"cuda_graph": "on", **changes})


def traced(**changes: Any) -> Trace:
    return self_test.trace(Request(spec_of(**changes)).job())


def assert_alike(*, compiled: bool = False, **changes: Any) -> None:
    ours = {phase.phase: phase for phase in predict(spec_of(compiled=compiled, **changes)).phases}
    theirs = {phase.phase: phase for phase in replay(traced(compiled=compiled, **changes)).phases}
    for name in PHASES[compiled:]:  # compiled, a first evaluation of small models is 8% off without a graph, too
        close = 0.015 if compiled else 0.01
        assert ours[name].allocated_bytes == pytest.approx(theirs[name].allocated_bytes, rel=close)
        assert ours[name].reserved_bytes == pytest.approx(theirs[name].reserved_bytes, rel=0.04)


def test_the_estimate_is_the_trace() -> None:
    assert_alike(gradient_accumulation_steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"master_weights": True}, {"dropout": 0.1}, {"loss_chunk_size": 512}])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_estimate_is_the_trace_in_other_runs(changes: dict[str, Any], *, compiled: bool) -> None:
    assert_alike(compiled=compiled, **changes)


def test_recording_has_its_own_pool_and_replay_takes_nothing() -> None:
    trace = traced()
    steady = [mark.position for mark in trace.phases if mark.name == "steady_step"]
    assert len(steady) == WARM_STEPS + 1
    births = [event for event in trace.events[steady[-1] :] if event >= 0]
    assert max(trace.allocations[birth].nbytes for birth in births) < MIB  # batches, and what a replay returns
    pooled = [a for a in trace.allocations if a.stream >= GRAPH_POOL]
    assert sum(a.nbytes for a in pooled) > 100 * MIB
    assert {a.stream for a in pooled} == {GRAPH_POOL + 1}  # the evaluation is recorded into the same one


def test_a_graph_has_the_batches_of_a_whole_step() -> None:
    few, many = 203, 403  # batches are at the peak
    batch_bytes = 2 * 8 * REFERENCE.batch_size * REFERENCE.block_size
    for peaks in (estimated_peak, traced_peak):
        more = peaks(gradient_accumulation_steps=many) - peaks(gradient_accumulation_steps=few)
        assert more == pytest.approx((many - few) * batch_bytes, rel=0.02)


def estimated_peak(**changes: Any) -> int:
    return next(phase.allocated_bytes for phase in predict(spec_of(**changes)).phases if phase.phase == "steady_step")


def traced_peak(**changes: Any) -> int:
    request = Request(spec_of(**changes))
    trace = request.whole(self_test.trace(request.job()))
    return next(phase.allocated_bytes for phase in replay(trace).phases if phase.phase == "steady_step")


def test_a_pool_keeps_its_segments_when_the_cache_is_emptied() -> None:
    allocator = Allocator()
    blocks = [allocator.malloc(30 * MIB, stream) for stream in (0, 1, GRAPH_POOL + 1)]
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.malloc(30 * MIB, 1) is not None
    assert allocator.reserved_bytes == 60 * MIB  # no other stream gets what a pool has
    assert allocator.malloc(30 * MIB, GRAPH_POOL + 1) is not None
    assert allocator.reserved_bytes == 60 * MIB


def test_no_graph_where_there_is_none_to_record() -> None:
    assert spec_of().is_one_graph
    assert not spec_of(eval_only=True).is_one_graph
    assert not StepSpec.of(config_of(), GPU, "nanogpt", dtype="bfloat16").is_one_graph


def test_moments_made_before_are_those_of_the_first_update() -> None:
    config = tiny()
    early, late = (build(config, torch.device("cpu"), torch.float32, compile=False) for _ in range(2))
    early.optimizer.begin()  # type: ignore[attr-defined]
    for state in (early, late):
        train_step(state, learnable_batches(config, 0), 1e-3)
    ours, theirs = early.optimizer.state_dict()["state"], late.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, moments in theirs.items():
        assert ours[number].keys() == moments.keys()
        for name, value in moments.items():
            assert torch.equal(ours[number][name], value)
            assert ours[number][name].dtype == value.dtype
