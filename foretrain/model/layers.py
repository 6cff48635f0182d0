"""Layers that several families share: RMSNorm that saves its result alone, and squared ReLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6


class _Norm(torch.autograd.Function):
    """x / rms(x) over the last dimension, in `dtype`.

    Backward takes the result, which the layer after it keeps anyway, and a number a row, so a norm keeps nothing of
    its own; F.rms_norm keeps its input, and on a CPU runs as twenty small kernels.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        y = torch.mul(x, scale).to(dtype)
        ctx.save_for_backward(y, scale)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        y, scale = ctx.saved_tensors
        along = (grads[0] * y).mean(-1, keepdim=True)  # what of the gradient would only change the length
        return torch.addcmul(grads[0], y, along, value=-1).to(ctx.dtype).mul_(scale), None, None


def norm(x: Tensor, dtype: torch.dtype, eps: float = NORM_EPS) -> Tensor:
    """x / rms(x) over the last dimension, in `dtype`: RMSNorm (arXiv:1910.07467) without weights."""
    y: Tensor = _Norm.apply(x, dtype, eps)
    return y


class _SquaredRelu(torch.autograd.Function):
    """max(0, x)² (So et al. 2021, arXiv:2109.08668). Backward needs the result alone: its root is max(0, x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.relu(x).square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # y / sqrt(y): a CPU takes fifteen times as long for the square root of 0 as for another one
        return y.clamp(min=torch.finfo(y.dtype).tiny).rsqrt_().mul_(y).mul_(grads[0]).mul_(2)


def squared_relu(x: Tensor) -> Tensor:
    """max(0, x)², x of any shape."""
    y: Tensor = _SquaredRelu.apply(x)
    return y
