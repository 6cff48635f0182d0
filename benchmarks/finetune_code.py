"""What published fine-tuning runs computed otherwise than transformers 5 does: losses and fused kernels, in PyTorch.

The estimate runs these in the place of the decoder's own (finetune_measured.py): which tensors are there together, and
what a kernel reads and writes. Values do not matter, nothing is fitted. N = B·T tokens, C width, V logits of each.

transformers 4.45.2, 4.48.1  loss/loss_utils.py, ForCausalLMLoss; models/*/modeling_*.py
fms-acceleration@876e2ed     plugins/fused-ops-and-kernels: unsloth's kernels (kernels/unsloth) and Liger's loss
                             (fused_ops/liger_ce)
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.model.hub.decoder import repeat_heads


def wide_head(decoder: Any, x: Tensor) -> Tensor:
    """Return transformers 4.45's logits: fp32 before the loss, with those in the model's dtype freed."""
    logits = decoder.lm_head(x)
    if decoder.facts.scaled_logits:
        logits = logits / 8.0
    return logits.float()


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return transformers 4.45 to 4.48's loss: fp32 logits, and a copy of them without the last token."""
    return half_loss(logits.float(), labels)


def half_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same for gpt_bigcode, which leaves the logits in their dtype."""
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, logits.shape[-1]), labels[..., 1:].contiguous().view(-1))


class _FastCrossEntropy(torch.autograd.Function):
    """unsloth's: a row's loss and the logarithm of its sum; the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *_: Tensor) -> Tensor:
        losses = logits.sum(-1)
        sums = torch.empty(losses.shape, dtype=torch.float32)
        ctx.save_for_backward(logits, sums)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, sums = ctx.saved_tensors
        logits.mul_(sums)  # times grads[0], which is 1 / N
        assert len(grads) == 1
        return logits, None


def fast_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Run unsloth's kernel over fp32 logits shifted by one (FastForCausalLMLoss)."""
    return fast_half_loss(logits.float(), labels)


def fast_half_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Run the same over gpt_bigcode's logits (FastCrossEntropyLoss)."""
    shifted = logits[..., :-1, :].contiguous()
    losses = _FastCrossEntropy.apply(shifted.view(-1, logits.shape[-1]), labels[..., 1:].contiguous().view(-1))
    return losses.mean()


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Liger's: head and loss of a few tokens at a time, with their gradients, never all logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        N, C, V = int(x.shape[0]), int(x.shape[1]), int(weight.shape[0])
        size = 2 ** math.ceil(math.log2(math.ceil(N / math.ceil(V / C))))
        grad_x = torch.zeros_like(x)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(N, dtype=torch.float32)
        for start in range(0, N, size):
            part = x[start : min(start + size, N)]
            logits = F.linear(part, weight)
            logits = logits.float()
            logits.mul_(losses[start : min(start + size, N)])
            logits = logits.to(x.dtype)
            scaled = logits * 0.5
            grad_x[start : min(start + size, N)].copy_(torch.matmul(scaled, weight))
            if grad_weight is not None:
                grad_weight.add_(torch.matmul(logits.t(), part))
        ctx.save_for_backward(grad_x, grad_weight)
        return losses.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        assert len(grads) == 1  # 1.0, by which nothing is multiplied
        return grad_x, grad_weight, None


def fused_forward(decoder: Any, idx: Tensor, labels: Tensor) -> Tensor:
    states = decoder.states(idx)
    x = states[..., :-1, :].contiguous()
    loss = _FusedLinearCrossEntropy.apply(
        x.view(-1, x.shape[-1]), decoder.lm_head.weight, labels[..., 1:].contiguous().view(-1)
    )
    del states
    return loss


class _FastNorm(torch.autograd.Function):
    """unsloth's RMSNorm: it saves its input and a number per row, overwrites the incoming gradient, and gives none to
    its weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = x * weight
        rates = torch.empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rates)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grads[0].mul_(ctx.saved_tensors[0])
        return grads[0], None


def fast_norm(norm: Any, x: Tensor) -> Tensor:
    return _FastNorm.apply(x, norm.weight)


class _FastRotary(torch.autograd.Function):
    """unsloth's rotary positions, in place, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        x.mul_(cos)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grads[0].mul_(ctx.saved_tensors[0])
        return grads[0], None, None


def fast_rotary(x: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Tensor:
    return _FastRotary.apply(x, cos, sin)


def repeating_attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Repeat keys and values for each head of queries, as Mistral of 4.45 does, though its flash attention does not
    need it.
    """
    groups = attention.facts.groups
    y = F.scaled_dot_product_attention(
        q, repeat_heads(k, groups), repeat_heads(v, groups), attn_mask=mask, is_causal=True
    )
    return y.transpose(1, 2).contiguous()


HELD: list[list[Tensor]] = []


def holding_split(attention: Any, x: Tensor, B: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gpt_bigcode 4.48's keys and values, views of the whole matrix, which the model's output holds."""
    f = attention.facts
    qkv = attention.qkv_proj(x)
    if HELD:
        HELD[0].append(qkv)
    width, kv = f.n_head * f.head_dim, f.n_kv_head * f.head_dim
    q, k, v = qkv.split([width, kv, kv], dim=-1)
    q = q.view(B, T, f.n_head, f.head_dim).transpose(1, 2)
    return q, *(part.view(B, T, f.n_kv_head, f.head_dim).transpose(1, 2) for part in (k, v))


def holding_forward(decoder: Any, idx: Tensor, labels: Tensor, loss_of: Any) -> Tensor:
    """Run a forward pass whose output holds them until the loss is made."""
    HELD.append([])
    states = decoder.states(idx)
    loss = loss_of(decoder.head(states), labels)
    del states
    HELD.clear()
    return loss
