"""Head and loss of unsloth (unsloth_zoo 2026.10.9, fused_losses/fused_linear.py): logits of a few tokens at a time, in
one buffer, with their gradients.

Where the head is frozen and the vocabulary large, tiles of tokens and words are summed as in attention
(`_tiled_forward`). Tokens without a label are left out: the last of each sequence, and others whose number is unknown,
so these count.

N = B·T tokens, R of them in a chunk, C width, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretrain.model.hub.kernels import card_bytes, launch, sums_half_in_fp32

BUDGET_BYTES = 2 << 30  # half of what is free at the first loss, where that is less
MOST_ROWS, FEWEST_ROWS, LEAST_LOGITS = 4096, 512, 512 * 151_936
SPLIT_COLUMNS = 16_384  # of the vocabulary, for one kernel
TILE_BYTES, SMALL_CARD_BYTES = 256 << 20, 24.5 * 2**30


def _below(x: float) -> int:
    return 1 << math.floor(math.log2(x)) if x >= 1 else 0


def chunk_rows(rows: int, width: int, vocabulary: int, logit_bytes: int) -> int:
    least = min(max(_below(LEAST_LOGITS / vocabulary), FEWEST_ROWS), MOST_ROWS)
    found = min(max(_below(rows * width / vocabulary), least), MOST_ROWS)
    return max(min(found, max(BUDGET_BYTES // (vocabulary * logit_bytes), 2), rows), 1)


def tile(rows: int, vocabulary: int, small: bool) -> tuple[int, int]:
    found = max(min(MOST_ROWS, rows, TILE_BYTES // (SPLIT_COLUMNS * 4)), 1)
    words = SPLIT_COLUMNS if small else max(TILE_BYTES // (found * 4), SPLIT_COLUMNS)
    return found, min(words - words % SPLIT_COLUMNS, -(-vocabulary // SPLIT_COLUMNS) * SPLIT_COLUMNS)


class _HeadPass(NamedTuple):
    """`learns`, `trains`: the head's input and its weight want gradients; `wide`: only logits are fp32."""

    learns: bool
    trains: bool
    dtype: Any  # of matmuls
    wide: bool
    tiled: bool
    small: bool

    @staticmethod
    def of(x: Tensor, weight: Tensor, rows: int, *, grad: bool) -> "_HeadPass":
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        trains = grad and weight.requires_grad
        wide = dtype.itemsize == 2 and sums_half_in_fp32(x.device)
        small = card_bytes(x.device) <= SMALL_CARD_BYTES
        large = -(-int(weight.shape[0]) // SPLIT_COLUMNS) > 2 and (small or rows >= MOST_ROWS)
        return _HeadPass(grad and x.requires_grad, trains, dtype, wide, wide and not trains and large, small)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, way: _HeadPass) -> Tensor:
        kept = x.new_empty((rows,), dtype=torch.int64)  # which of the tokens
        launch("gather", kept, targets)
        grad_x = torch.zeros_like(x) if way.learns else None
        grad_weight = torch.zeros_like(weight) if way.trains else None
        losses = x.new_empty((rows,), dtype=torch.float32)
        narrow = weight.to(way.dtype)
        if way.tiled:
            _tiled(x, narrow, grad_x, rows, way, (kept, losses))
        else:
            _chunked(x, narrow, grad_x, grad_weight, rows, way, (kept, losses))
        ctx.save_for_backward(grad_x, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        found = []
        for gradient in ctx.saved_tensors:
            scaled = None
            if gradient is not None:
                scaled = torch.empty_like(gradient)
                launch("triton_add", scaled, gradient, grads[0])
            found.append(scaled)
        return found[0], found[1], None, None, None


def _gathered(x: Tensor, rows: int, kept: Tensor, dtype: Any) -> Tensor:
    out = x.new_empty((rows, x.shape[-1]), dtype=x.dtype)
    launch("gather", out, out, kept)
    return out.to(dtype)


def _chunked(
    x: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    rows: int,
    way: _HeadPass,
    others: tuple[Tensor, Tensor],
) -> None:
    C, V = x.shape[-1], weight.shape[0]
    dtype = torch.float32 if way.wide else way.dtype
    size = chunk_rows(rows, int(C), int(V), dtype.itemsize)
    room = x.new_empty((size, -(-V // 8) * 8), dtype=dtype)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        states, logits = _gathered(x, count, others[0], way.dtype), room[:count]
        launch("matmul", logits, states, weight, shape=(count, V, C))
        launch("triton_softmax", (logits, others[1]), logits, logits, others[0])  # a row is read twice
        if grad_x is not None:
            found = _product(logits, weight, way)
            own = found.to(grad_x.dtype)
            launch("scatter", own, own, others[0])
            del found, own
        if grad_weight is not None:
            launch("matmul_weight", grad_weight, logits, states, grad_weight, shape=(V, C, count))


def _product(logits: Tensor, weight: Tensor, way: _HeadPass) -> Tensor:
    """Return the gradient of states in fp32: at once where the card can, else by a copy."""
    rows, (V, C) = logits.shape[0], weight.shape
    found = logits.new_empty((rows, C), dtype=torch.float32 if way.wide else way.dtype)
    launch("matmul_input", found, logits, weight, shape=(rows, C, V))
    return found.to(torch.float32)


def _tiled(
    x: Tensor, weight: Tensor, grad_x: Tensor | None, rows: int, way: _HeadPass, others: tuple[Tensor, Tensor]
) -> None:
    C, V = x.shape[-1], weight.shape[0]
    size, words = tile(rows, int(V), way.small)
    sums = x.new_empty((rows,), dtype=torch.float32)
    room = x.new_empty((size, words), dtype=torch.float32)
    total = largest = None
    if grad_x is not None:
        total, largest = x.new_empty((size, C), dtype=torch.float32), x.new_empty((size,), dtype=torch.float32)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        states = _gathered(x, count, others[0], way.dtype)
        parts = x.new_empty((8, -(-int(V) // SPLIT_COLUMNS), count), dtype=torch.float32)
        for first in range(0, int(V), words):
            n = min(words, int(V) - first)
            logits = room[:count, :n]
            launch("matmul", logits, states, weight[first : first + n], shape=(count, n, C))
            launch("triton_softmax", (logits, parts), logits, logits)
            if total is not None:
                own = total[:count]
                launch("matmul_input", own, logits, weight[first : first + n], own, shape=(count, C, n))
        launch("triton_add", (sums, others[1]), parts)
        if total is not None and grad_x is not None:
            launch("triton_add", grad_x[start : start + count], total[:count])
    del largest


class ChunkedLoss(nn.Module):
    def forward(self, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        B, T = labels.shape
        targets = torch.cat((labels[..., 1:], labels[..., :1]), dim=-1)
        rows = int(B) * (int(T) - 1)
        x = states.reshape(-1, states.shape[-1])
        way = _HeadPass.of(x, weight, rows, grad=torch.is_grad_enabled())
        total: Tensor = _Head.apply(x, weight, targets.reshape(-1), rows, way)
        return total / 1.0  # as many as there are labels


def whole_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of B x T x V logits, for an evaluation that collects them (Fast_CrossEntropyLoss)."""
    targets = torch.empty_like(labels)
    launch("gather", targets, labels)
    rows = logits.view(-1, logits.shape[-1])
    losses = rows.new_empty((rows.shape[0],), dtype=torch.float32)
    launch("triton_softmax", losses, rows, targets)
    return losses.sum() / 1.0
