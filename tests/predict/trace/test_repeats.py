"""Micro-batches that a trace leaves out are repeated, until the allocator has settled."""

import pytest

from foretrain.base.units import MIB
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import drive, self_test
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.repeats import with_all_micro_batches
from foretrain.predict.trace.service import Request

CARD = find("RTX 4070")


def traced(config: RunConfig, dtype: str, step: str) -> tuple[Request, Trace]:
    """As the service makes it: with three micro-batches at most."""
    request = Request(StepSpec.of(config, CARD, step, dtype=dtype, compiled=False))  # type: ignore[arg-type]
    return request, self_test.trace(request.job())


@pytest.mark.parametrize("step", ["foretrain", "nanogpt"])
def test_repeating_gives_what_tracing_all_of_them_gives(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(
        n_layer=1,
        n_head=2,
        n_embd=66,
        block_size=97,
        vocab_size=1013,
        batch_size=3,
        gradient_accumulation_steps=6,
        cuda_graph="off",
    )
    request, three = traced(config, "bfloat16", step)
    monkeypatch.setattr(drive, "MICRO_STEPS", 6)
    job = {**request.job(), "config": config.model_dump(mode="json")}
    for found, whole in zip(replay(request.whole(three)).phases, replay(self_test.trace(job)).phases, strict=True):
        assert found.phase == whole.phase
        assert (found.allocated_bytes, found.reserved_bytes) == (whole.allocated_bytes, whole.reserved_bytes)


def test_the_fourth_micro_batch_can_need_more() -> None:
    """Three micro-batches reserve 880 MiB. With eight of them PyTorch's CUDA build counts 868 MiB in the first step and
    1,030 MiB from then on (tests/cuda_build, "eager 147")."""
    config = RunConfig(
        n_layer=2, n_head=3, n_embd=240, block_size=97, vocab_size=50257, batch_size=8, dropout=0.2,
        gradient_accumulation_steps=8,
    )  # fmt: skip
    request, three = traced(config, "bfloat16", "nanogpt")
    whole = request.whole(three)
    reserved = {phase.phase: phase.reserved_bytes for phase in replay(whole).phases}
    assert (reserved["first_step"], reserved["steady_step"]) == (868 * MIB, 1030 * MIB)
    assert replay(three).peak_reserved_bytes == 880 * MIB


def test_alternating_layouts_end_where_the_last_micro_batch_does() -> None:
    """Free blocks lie otherwise after every second micro-batch. Under 823 MiB PyTorch's CUDA build does all eight and
    reserves 756 MiB (tests/cuda_build/edge.py, "eager 086")."""
    config = RunConfig(
        n_layer=4, n_head=2, n_embd=128, block_size=256, vocab_size=50257, batch_size=3, grad_clip=0.0,
        gradient_accumulation_steps=8,
    )  # fmt: skip
    request, three = traced(config, "float16", "nanogpt")
    found = replay(request.whole(three), limit_bytes=823 * MIB)
    assert found.survives
    assert found.peak_reserved_bytes == 756 * MIB


def test_a_repeated_trace_is_whole() -> None:
    config = RunConfig(n_layer=1, n_head=1, n_embd=32, block_size=64, vocab_size=256, gradient_accumulation_steps=40,
                       cuda_graph="off")  # fmt: skip
    request, three = traced(config, "float32", "foretrain")
    whole = request.whole(three)
    assert len(three.events) < len(whole.events) < 20 * len(three.events)  # it stops when the allocator has settled
    assert [mark.name for mark in whole.phases] == [mark.name for mark in three.phases]
    assert whole.moments == sorted(whole.moments, key=lambda mark: mark.position)
    for allocation in whole.allocations:
        assert whole.events[allocation.allocated_at] == allocation.id
        assert allocation.freed_at is None or whole.events[allocation.freed_at] == ~allocation.id
    assert with_all_micro_batches(three, 3, 3) is three
