"""Attention as matrix products against PyTorch's own attention in fp64, and inside the model and the compiler."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretrain.config import shape
from foretrain.model import attention
from foretrain.model.gpt2 import GPT
from tests.kit.tiny import tiny

# Largest error relative to the largest element. bfloat16 keeps 8 bits; scores, probabilities and results are rounded.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3 * 2**-8}


def reference(qkv: Tensor, H: int) -> Tensor:
    B, T, width = qkv.shape
    heads = (B, T, H, width // 3 // H)
    q, k, v = (part.view(heads).transpose(1, 2) for part in qkv.split(width // 3, 2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(B, T, width // 3)


def both_ways(qkv: Tensor, H: int, dy: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((result, gradient) of ours, the same of the reference in fp64)."""
    own = qkv.clone().requires_grad_()
    exact = qkv.double().requires_grad_()
    y, expected = attention.causal_attention(own, H), reference(exact, H)
    return (y, torch.autograd.grad(y, own, dy)[0]), (expected, torch.autograd.grad(expected, exact, dy.double())[0])


def assert_close(own: Tensor, exact: Tensor, tolerance: float) -> None:
    assert own.shape == exact.shape
    assert own.isfinite().all()
    assert (own.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-3)


@settings(max_examples=60)
@given(
    B=st.integers(1, 3), H=st.integers(1, 4), T=st.integers(1, 150), D=st.sampled_from([1, 8, 20, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)), rows=st.sampled_from([16, 64, 256]), group=st.sampled_from([1, 40_000, 1 << 22]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_result_and_gradient_are_those_of_the_reference(
    B: int, H: int, T: int, D: int, dtype: torch.dtype, rows: int, group: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, T, 3 * H * D, generator=random).to(dtype)
    dy = torch.randn(B, T, H * D, generator=random).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "ROWS", rows)
        patch.setattr(shape, "GROUP_BYTES", group)
        (y, gradient), (expected, expected_gradient) = both_ways(qkv, H, dy)
    assert y.dtype == gradient.dtype == dtype
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(gradient, expected_gradient, TOLERANCE[dtype])


def test_no_token_sees_a_later_one() -> None:
    qkv = torch.randn(1, 40, 3 * 16)
    changed = qkv.clone()
    changed[:, 25:] += 1.0
    before, after = (attention.causal_attention(x, 2) for x in (qkv, changed))
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


def test_it_is_an_operation_as_the_compiler_wants_them() -> None:
    # Probabilities kept, and computed again; one sequence, whose heads would be a view; one token of one head.
    for B, T, H in ((2, 12, 2), (2, 80, 2), (1, 80, 2), (1, 12, 2), (1, 1, 1)):
        qkv = torch.randn(B, T, 3 * H * 8, requires_grad=True)
        outputs = torch.ops.foretrain.attention(qkv, H)
        assert not {out.untyped_storage().data_ptr() for out in outputs} & {qkv.untyped_storage().data_ptr()}
        fakes = attention._forward_shapes(qkv, H)
        assert [(out.shape, out.stride()) for out in outputs] == [(fake.shape, fake.stride()) for fake in fakes]
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.foretrain.attention, (qkv, H), test_utils=tests)


@pytest.mark.parametrize("T", [16, 64])
def test_what_waits_for_backward_is_bounded(T: int) -> None:
    """q, k, v, and no more than four times C of probabilities per token."""
    B, H, D = 2, 2, 4
    kept = []
    qkv = torch.randn(B, T, 3 * H * D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention.causal_attention(qkv, H)
    heads, probabilities = kept
    assert heads.numel() == qkv.numel()
    assert probabilities.numel() == (B * H * T * T if T <= 4 * D else 0)
    assert probabilities.numel() <= 4 * B * T * H * D


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_learns_the_same_with_either(checkpointing: bool) -> None:
    config = tiny(activation_checkpointing=checkpointing)
    idx = torch.randint(0, config.vocab_size, (4, 16))
    results = []
    for kind in ("sdpa", "bmm"):
        torch.manual_seed(0)
        model = GPT(config.model_copy(update={"attention": kind})).train()
        loss = model(idx, idx.roll(-1, 1))
        loss.backward()
        results.append((loss, model.transformer["h"][0].attn.c_attn.weight.grad))  # type: ignore[index, union-attr]
    (loss, gradient), (other_loss, other_gradient) = results
    assert loss.item() == pytest.approx(other_loss.item(), rel=1e-6)
    assert torch.allclose(gradient, other_gradient, rtol=1e-4, atol=1e-7)


def test_dropout_goes_through_pytorch() -> None:
    """The products have no dropout, so a model that drops uses sdpa while it trains, and draws what sdpa draws."""
    idx = torch.randint(0, 96, (2, 16))
    losses = []
    for kind in ("sdpa", "bmm"):
        torch.manual_seed(0)
        model = GPT(tiny(dropout=0.3, attention=kind)).train()
        losses.append(model(idx, idx).item())
    assert losses[0] == losses[1]
