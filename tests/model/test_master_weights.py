"""Half-precision weights with fp32 masters: autocast's learning to the rounding of half precision, and exact resumes."""

from pathlib import Path

import pytest
import torch

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.model.layers import TokenEmbedding
from foretrain.model.step import TrainState, build, evaluation_loss, train_step
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import self_test
from foretrain.predict.trace.service import Request
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from tests.kit.kernels import learnable_batches
from tests.kit.tiny import tiny

CPU = torch.device("cpu")


def run(config: RunConfig, dtype: torch.dtype, steps: int) -> tuple[TrainState, list[float]]:
    state = build(config, CPU, dtype, compile=config.compile)
    return state, [float(train_step(state, learnable_batches(config, step), 3e-3).loss) for step in range(steps)]


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, 24), (torch.float16, 0)], ids=str)
def test_it_learns_as_autocast_does(dtype: torch.dtype, chunk: int) -> None:
    _, expected = run(tiny(loss_chunk_size=chunk), dtype, 60)
    state, found = run(tiny(loss_chunk_size=chunk, master_weights=True), dtype, 60)
    assert expected[-1] < 0.6 * expected[0]
    assert found == pytest.approx(expected, rel=0.03)
    assert {p.dtype for p in state.model.parameters()} == {dtype}
    assert {p.dtype for p in state.trained.parameters()} == {torch.float32}
    for low, full in zip(state.model.parameters(), state.trained.parameters(), strict=True):
        assert torch.equal(low, full.to(dtype))


def test_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    """Against the same half-precision gradients, summed by hand."""
    config = tiny(master_weights=True, gradient_accumulation_steps=8, grad_clip=1e-9)
    state = build(config, CPU, torch.bfloat16, compile=False)
    by_hand = [torch.zeros_like(p, dtype=torch.float32) for p in state.model.parameters()]
    for batch in learnable_batches(config, 0):
        low = torch.autograd.grad(state.call(*batch) / 8, list(state.model.parameters()))
        for total, part in zip(by_hand, low, strict=True):
            total += part.float()
    norm = torch.cat([total.flatten() for total in by_hand]).norm()
    assert float(train_step(state, learnable_batches(config, 0), 0.0).grad_norm) == pytest.approx(float(norm), rel=2e-3)


def test_fp32_gradients_moved_one_by_one_are_the_same_bits() -> None:
    """Sums over micro-batches are in fp32 either way."""
    late = tiny(gradient_accumulation_steps=5, optimizer_offload=True)
    (expected, losses), (found, own) = (
        run(late.model_copy(update={"gradient_offload": early}), torch.bfloat16, 4) for early in (False, True)
    )
    assert own == losses
    for a, b in zip(found.trained.parameters(), expected.trained.parameters(), strict=True):
        assert torch.equal(a, b)


def test_half_precision_gradients_differ_by_their_rounding() -> None:
    """What is made in fp32 (a tied weight's sum, a norm's gradient) is rounded once more on its way."""
    late = tiny(gradient_accumulation_steps=5, optimizer_offload=True, master_weights=True)
    losses, own = (
        run(late.model_copy(update={"gradient_offload": early}), torch.bfloat16, 60)[1] for early in (False, True)
    )
    assert own == pytest.approx(losses, rel=0.01)
    assert own[-1] < 0.6 * own[0]


def test_moved_gradient_is_forgotten_with_the_others() -> None:
    """As after a micro-batch that ran out of memory, whose step begins anew."""
    state = build(tiny(optimizer_offload=True, gradient_offload=True), CPU, torch.float32, compile=False)
    state.call(*learnable_batches(state.config, 0)[0]).backward()
    assert all(p.grad is None for p in state.model.parameters())
    assert all(p.grad is not None for p in state.trained.parameters())
    state.masters.drop_gradients()
    assert all(p.grad is None for p in state.trained.parameters())


def test_fp32_has_no_masters() -> None:
    state, _ = run(tiny(master_weights=True), torch.float32, 1)
    assert state.masters is None
    assert state.trained is state.model


def test_an_overflow_in_float16_changes_nothing() -> None:
    state, _ = run(tiny(master_weights=True), torch.float16, 1)
    before = [p.clone() for p in state.trained.parameters()]
    call = state.call
    state.call = lambda idx, targets: call(idx, targets) * float("inf")
    train_step(state, learnable_batches(state.config, 1), 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(before, state.trained.parameters(), strict=True))


def test_a_checkpoint_keeps_the_masters_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = tiny(master_weights=True, dropout=0.1)
    state, _ = run(config, torch.bfloat16, 3)
    checkpoint.save(tmp_path, state, Progress(step=3))
    other = build(config.model_copy(update={"seed": 5}), CPU, torch.bfloat16, compile=False)
    assert checkpoint.load(tmp_path, other)
    for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = []
    for each in (state, other):
        torch.manual_seed(7)
        losses += [
            float(train_step(each, learnable_batches(config, 4), 1e-2).loss),
            float(evaluation_loss(each, learnable_batches(config, 5)[0])),
        ]
    assert losses[:2] == losses[2:]


def test_embedding_gradients_of_frequent_tokens_are_whole() -> None:
    """In bfloat16 a running sum of ones stops at 256."""
    table = TokenEmbedding(3, 4, dtype=torch.bfloat16)
    weight = table.weight
    weight.grad_dtype = torch.float32
    table(torch.zeros(2, 2048, dtype=torch.int64)).sum().backward()
    assert weight.grad[0].tolist() == [4096.0] * 4


def test_what_stays_on_the_host_is_never_on_the_card() -> None:
    """A card that holds the weights alone can take them: the fp32 twin is made on the host."""
    config = tiny(n_embd=256, vocab_size=4096, n_layer=4, master_weights=True, optimizer_offload=True)
    trace = self_test.trace(Request(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=False)).job())
    assert trace.peaks()["build"][0] == pytest.approx(2 * ModelShape.of(config).n_params, rel=0.01)
