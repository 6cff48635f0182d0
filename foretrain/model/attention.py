"""Causal attention as plain batched matmuls, for CPUs.

PyTorch's fused attention kernel on a CPU has a slow backward pass, above all in bfloat16; matmuls through oneDNN do
not. Scores are in the dtype of q, k and v. The softmax is fp32 inside its kernel. Rows skip blocks of keys that they
cannot see. It is one operation for autograd and for the compiler, so that both run the same kernels.

Saved for backward: q, k and v, and the probabilities if they take no more than q, k, v and the result together (T <= 4
D); longer rows recompute them. Heads are taken in groups of about 2 MiB of scores (config/shape.py).

Letters: B micro-batch, T context, C width, H heads, D = C / H, N = B x H.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foretrain.config import shape as sizes


@lru_cache(maxsize=8)
def _future(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def _blocks(T: int) -> Iterator[slice]:
    rows = sizes.rows_at_once(T)
    for start in range(0, T, rows):
        yield slice(start, min(start + rows, T))


def _groups(N: int, T: int, item_bytes: int) -> Iterator[slice]:
    size = sizes.group_size(N, T, item_bytes)
    for start in range(0, N, size):
        yield slice(start, min(start + size, N))


def _probabilities(q: Tensor, k: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    R = q.shape[1]
    scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=scale)
    scores[:, :, -R:].masked_fill_(_future(R), float("-inf"))
    return torch.softmax(scores, -1, out=out) if out is not None else torch.softmax(scores, -1)


def _heads(qkv: Tensor, H: int) -> Tensor:
    """Copy B x T x 3C to 3 x N x T x D: never a view of qkv, which an operation may not return."""
    B, T, width = qkv.shape
    heads = qkv.new_empty(3, B, H, T, width // 3 // H)
    heads.copy_(qkv.view(B, T, 3, H, width // 3 // H).permute(2, 0, 3, 1, 4))
    return heads.view(3, B * H, T, -1)


def _forward(qkv: Tensor, H: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (result: B x T x C, heads: 3 x N x T x D, probabilities: N x T x T or nothing)."""
    B, T, width = qkv.shape
    heads = _heads(qkv, H)
    q, k, v = heads
    N, _, D = q.shape
    keep = sizes.keeps_probabilities(T, D)
    kept = qkv.new_empty((N, T, T) if keep else (0,))
    result = torch.empty_like(q)
    for g in _groups(N, T, qkv.element_size()):
        for r in _blocks(T):
            keys, values = k[g, : r.stop], v[g, : r.stop]
            # No name holds the probabilities, so they are freed before the next are made.
            if T <= sizes.WHOLE:
                torch.bmm(_probabilities(q[g], keys, D**-0.5, kept[g] if keep else None), values, out=result[g])
            else:
                result[g, r] = torch.bmm(_probabilities(q[g, r], keys, D**-0.5), values)
    return result.view(B, H, T, D).transpose(1, 2).reshape(B, T, width // 3), heads, kept


def _backward(grad: Tensor, heads: Tensor, kept: Tensor, H: int) -> Tensor:
    B, T, C = grad.shape
    q, k, v = heads
    N, _, D = q.shape
    dy = grad.view(B, T, H, D).transpose(1, 2).reshape(N, T, D)
    gradient = torch.empty_like(heads)
    for g in _groups(N, T, heads.element_size()):
        if T <= sizes.WHOLE:
            p = kept[g] if kept.numel() else _probabilities(q[g], k[g], D**-0.5)
            _block_backward(dy[g], q[g], k[g], v[g], p, gradient[:, g].unbind(0))
            continue
        sums = torch.zeros((2, *q[g].shape), dtype=torch.float32)  # of blocks: a sum in bfloat16 would lose bits
        for r in _blocks(T):
            keys, values = k[g, : r.stop], v[g, : r.stop]
            p = _probabilities(q[g, r], keys, D**-0.5)
            parts = (q.new_empty(q[g, r].shape), torch.empty_like(keys), torch.empty_like(keys))
            _block_backward(dy[g, r], q[g, r], keys, values, p, parts)
            gradient[0, g, r] = parts[0]
            sums[0, :, : r.stop] += parts[1]
            sums[1, :, : r.stop] += parts[2]
        gradient[1:, g] = sums.to(gradient.dtype)
    return gradient.view(3, B, H, T, D).permute(1, 3, 0, 2, 4).reshape(B, T, 3 * C)


def _block_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, out: Any) -> None:
    """Write gradients of q, k, v into `out`, for some queries (n x R x D) and the keys that they see (n x K x D)."""
    dq, dk, dv = out
    scale = q.shape[-1] ** -0.5
    torch.bmm(p.transpose(1, 2), dy, out=dv)
    dp = torch.bmm(dy, v.transpose(1, 2))
    ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
    torch.baddbmm(dq, ds, k, beta=0, alpha=scale, out=dq)
    torch.baddbmm(dk, ds.transpose(1, 2), q, beta=0, alpha=scale, out=dk)


_library = torch.library.Library("foretrain", "DEF")
_library.define("attention(Tensor qkv, int H) -> (Tensor, Tensor, Tensor)")
_library.define("attention_backward(Tensor grad, Tensor heads, Tensor kept, int H) -> Tensor")
_library.impl("attention", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")


@torch.library.register_fake("foretrain::attention", lib=_library)
def _forward_shapes(qkv: Tensor, H: int) -> tuple[Tensor, Tensor, Tensor]:
    B, T, width = qkv.shape
    D = width // 3 // H
    kept = (B * H, T, T) if sizes.keeps_probabilities(T, D) else (0,)
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(3, B * H, T, D), qkv.new_empty(kept)


@torch.library.register_fake("foretrain::attention_backward", lib=_library)
def _backward_shapes(grad: Tensor, heads: Tensor, kept: Tensor, H: int) -> Tensor:
    B, T, C = grad.shape
    return grad.new_empty(B, T, 3 * C)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.H = inputs[1]


def _gradient(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None]:
    if grad is None:
        return None, None
    return torch.ops.foretrain.attention_backward(grad, *ctx.saved_tensors, ctx.H), None


torch.library.register_autograd("foretrain::attention", _gradient, setup_context=_save, lib=_library)


def causal_attention(qkv: Tensor, n_head: int) -> Tensor:
    result: Tensor = torch.ops.foretrain.attention(qkv, n_head)[0]
    return result
