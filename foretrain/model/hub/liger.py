"""Liger's kernels (linkedin/Liger-Kernel 0.8.2) as memory sees them: tensors are made, saved for backward and
overwritten as its functions do; what its Triton kernels compute is left out (kernels.py).

ops/rms_norm.py                     saves the input and one number per row; one row of the weight's gradient for each
                                    processor; the gradient overwrites the incoming one where `in_place`
ops/swiglu.py, geglu.py             save gate and up, which become their own gradients
ops/rope.py                         rotates queries and keys in place, forward and backward
ops/cross_entropy.py                logits become their own gradient
ops/fused_linear_cross_entropy.py   head and loss of a few tokens at a time, with their gradients
ops/utils.py, ensure_contiguous     copies what is not row-major

N = B·T tokens, n of them in a chunk, C width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.model.hub.kernels import launch, processors, sums_half_in_fp32


class Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        out = torch.empty_like(rows)
        rates = rows.new_empty((rows.shape[0],), dtype=torch.float32)
        launch("triton_norm", (out, rates), rows, weight)
        ctx.in_place = in_place
        ctx.save_for_backward(rows, weight, rates)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight, rates = ctx.saved_tensors
        grad = grads[0].contiguous()
        flat = grad.view(rows.shape)
        sums = flat.new_empty((processors(flat.device), rows.shape[-1]), dtype=torch.float32)
        found = flat if ctx.in_place else torch.zeros_like(flat)
        launch("triton_norm_backward", (found, sums), flat, rows, weight, rates)
        found = found.view(grad.shape)
        return found, sums.sum(0).to(weight.dtype), None  # of a frozen weight, too


def rms_norm(x: Tensor, weight: Tensor, *, in_place: bool) -> Tensor:
    out: Tensor = Rms.apply(x, weight, in_place)
    return out


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        gate_rows, up_rows = gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1])
        out = torch.empty_like(gate_rows)
        launch("triton_gelu", out, gate_rows, up_rows)
        ctx.save_for_backward(gate_rows, up_rows)
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grads[0].contiguous()
        launch("triton_gelu_backward", (gate, up), grad, gate, up)
        return gate.view(grad.shape), up.view(grad.shape)


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _GatedProduct.apply(gate, up)
    return out


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        launch("triton_add", (q, k), q, k, cos, sin)
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        q, k = grads[0].transpose(1, 2).contiguous(), grads[1].transpose(1, 2).contiguous()
        launch("triton_add", (q, k), q, k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = Rotary.apply(q, k, cos, sin)
    return q, k


IGNORED = -100


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = logits.new_zeros((logits.shape[0],), dtype=logits.dtype)
        _count(labels)
        launch("triton_softmax", (logits, losses), logits, logits, labels)  # a row is read twice
        if logits.requires_grad:
            ctx.save_for_backward(logits.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        launch("triton_add", logits, logits, grads[0])
        return logits, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    total: Tensor = _CrossEntropy.apply(logits, labels)
    return total / 1.0  # as many as there are labels (fixed_cross_entropy)


def chunk_tokens(tokens: int, width: int, vocabulary: int) -> int:
    """Return n: a power of two for which logits take about as much as all hidden states."""
    least = -(-tokens // -(-vocabulary // width))
    return 1 << (least - 1).bit_length()


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        N = x.shape[0]
        size = chunk_tokens(int(N), int(x.shape[1]), int(weight.shape[0]))
        learns = x.requires_grad
        grad_x = torch.zeros_like(x)
        grad_weight = torch.zeros_like(weight) if learns and weight.requires_grad else None
        losses = x.new_zeros((N,), dtype=torch.float32)
        _count(labels)
        grad_logits_t = held = None
        for start in range(0, N, size):
            end = min(start + size, N)
            part = x[start:end]
            logits = part @ weight.t()
            own = losses[start:end]
            launch("triton_softmax", (logits, own), logits, logits, labels[start:end])
            losses[start:end].copy_(own)
            grad_logits = logits
            if learns:
                grad_x[start:end].copy_(grad_logits @ weight)
            if grad_weight is not None:
                grad_logits_t = grad_logits.t()
                held = _add_product(grad_weight, grad_logits_t, part)
        loss = losses.sum()
        del held
        ctx.save_for_backward(grad_x.detach(), None if grad_weight is None else grad_weight.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        launch("triton_add", grad_x, grad_x, grads[0])
        if grad_weight is not None:
            launch("triton_add", grad_weight, grad_weight, grads[0])
        return grad_x, grad_weight, None


def _add_product(total: Tensor, grad_logits_t: Tensor, x: Tensor) -> Tensor | None:
    """Add the weight's gradient of a chunk, in one matmul where sums are fp32 and the card can."""
    wide = total.dtype == torch.float32 and grad_logits_t.dtype != torch.float32
    if wide and sums_half_in_fp32(total.device):
        x = x.to(grad_logits_t.dtype)
        launch("matmul_weight", total, grad_logits_t, x, total, shape=(*total.shape, x.shape[0]))
        return x
    total += (grad_logits_t @ x).float()
    return None


class FusedLoss(nn.Module):
    """The loss of hidden states without ever having all logits (transformers/model/loss_utils.py)."""

    def forward(self, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        labels = F.pad(labels, (0, 1), value=IGNORED)
        shifted = labels[..., 1:].contiguous()
        total: Tensor = _FusedHead.apply(states.view(-1, states.shape[-1]), weight, shifted.view(-1))
        return total / 1.0  # as many as there are labels
