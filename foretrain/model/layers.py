from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.model.language_model import LanguageModel

NORM_EPS = 1e-6


class _Norm(torch.autograd.Function):
    """x / rms(x) over the last dimension, in `dtype`; backward takes the result, which the next layer saves anyway."""

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
        along = (grads[0] * y).mean(-1, keepdim=True)  # the part of the gradient that only changes the length
        return torch.addcmul(grads[0], y, along, value=-1).to(ctx.dtype).mul_(scale), None, None


def norm(x: Tensor, dtype: torch.dtype, eps: float = NORM_EPS) -> Tensor:
    y: Tensor = _Norm.apply(x, dtype, eps)
    return y


class _SquaredRelu(torch.autograd.Function):
    """max(0, x)² (So et al. 2021, arXiv:2109.08668). Backward needs only the result: its root is max(0, x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.relu(x).square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # y / sqrt(y), without roots of 0, which take a CPU fifteen times as long
        return y.clamp(min=torch.finfo(y.dtype).tiny).rsqrt_().mul_(y).mul_(grads[0]).mul_(2)


def squared_relu(x: Tensor) -> Tensor:
    y: Tensor = _SquaredRelu.apply(x)
    return y


# A CPU sums the rows of the embedding's gradient in their dtype: in bfloat16 a sum of ones ends at 256
# (aten/src/ATen/native/Embedding.cpp, embedding_dense_backward_cpu). CUDA's kernels and Inductor's sum in fp32.


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, idx: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(idx)
        ctx.shape = weight.shape
        return F.embedding(idx, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (idx,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=idx.device)
        return None, total.index_add_(0, idx.flatten(), grads[0].flatten(0, -2).float())


class TokenEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        half = self.weight.dtype != torch.float32
        if half and self.weight.device.type == "cpu" and not torch.compiler.is_compiling():
            out: Tensor = _Lookup.apply(input, self.weight)
            return out
        return F.embedding(input, self.weight)


# Rotary positions: Su et al. 2021, arXiv:2104.09864. B micro-batch, T context, C width, H heads, D width of a head.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate column i of each head (B x T x H x D) against column i + D/2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotary_tables(block_size: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of `rotate`, each T x 1 x D, fp32."""
    rates = base ** -torch.arange(0, width, 2, dtype=torch.float64).div(width)
    angles = torch.arange(block_size, dtype=torch.float64)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()


class RotaryModel(LanguageModel):
    def keep_tables(self, width: int, base: float, *, back: bool = False) -> None:
        cos, sin = rotary_tables(self.block_size, width, base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", -sin if back else sin, persistent=False)

    def embed(self, idx: Tensor) -> Tensor:
        raise NotImplementedError

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the first block, made from the embedding; all but its first are for every block."""
        return (x,)

    def leave(self, x: Tensor, low: torch.dtype) -> Tensor:
        raise NotImplementedError

    def hidden(self, idx: Tensor) -> Tensor:
        T, device = idx.shape[1], idx.device.type
        assert self.block_size >= T, f"context of {T} tokens, the model has {self.block_size} positions"
        x = self.embed(idx)
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        tables: Any = self.cos, self.sin
        cos, sin = (table[:T].to(low) for table in tables)
        x, *beside = self.enter(x)
        for i in range(len(self.layers())):
            x = self.block(i, x, *beside, cos, sin)
        return self.leave(x, low)
