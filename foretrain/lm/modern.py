"""The model of `recipe = modern`: a GPT with what both modded-nanogpt and nanochat kept (docs/recipes.md).

The forward pass, op by op (eager; N tokens a micro-batch, `low` the dtype that autocast gives to matrix products):

    x = x0 = norm(embedding(idx))                       N x C, fp32: the residual stream stays fp32
    each block: x = x + skip·x0                         addcmul, `skip` a learned scalar
                h = norm(x) -> low
                qkv = h·Wqkvᵀ; q, k = rotate(q, k)      one mul, one roll, one addcmul for q and k together
                q, k = norm(q, k); v = v + value·v₁     v₁: the first block's values; `value` a learned scalar
                x = x + attention(q, k, v)·Woutᵀ        flash attention, causal
                h = norm(x) -> low
                x = x + max(0, h·Wupᵀ)²·Wdownᵀ
    logits = norm(x)·Wheadᵀ                             a head of its own

Backward keeps, per block and in `low`: h (N·C), q and k (2·N·C), v (N·C), attention's output (N·C), h (N·C), the
squared ReLU (4·N·C), and fp32 numbers a row for the norms (1 + 2·H + 1) and attention (H); once, x0 in fp32 and the
first block's qkv. The norms keep their results, which the next product keeps anyway, and the residual stream is kept
nowhere.

Shapes: B micro-batch, T context, C width, H heads, D = C / H, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretrain.config import RunConfig
from foretrain.lm.model import LanguageModel
from foretrain.lm.shape import MIX

NORM_EPS = 1e-6
ROPE_BASE = 10_000.0  # Su et al. 2021, arXiv:2104.09864
EMBEDDING_STD = 0.02


class _Norm(torch.autograd.Function):
    """x / rms(x) over the last dimension, in `dtype`.

    Backward takes the result, which the layer after it keeps anyway, and a number a row, so a norm keeps nothing of
    its own; F.rms_norm keeps its input, and on a CPU runs as twenty small kernels.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale.square_().mul_(1 / x.shape[-1]).add_(NORM_EPS).rsqrt_()
        y = torch.mul(x, scale).to(dtype)
        ctx.save_for_backward(y, scale)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (grads[0] * y).mean(-1, keepdim=True)  # what of the gradient would only change the length
        return torch.addcmul(grads[0], y, along, value=-1).to(ctx.dtype).mul_(scale), None


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


def norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x / rms(x) over the last dimension, in `dtype`: RMSNorm (arXiv:1910.07467) without weights."""
    y: Tensor = _Norm.apply(x, dtype)
    return y


def squared_relu(x: Tensor) -> Tensor:
    """max(0, x)², x of any shape."""
    y: Tensor = _SquaredRelu.apply(x)
    return y


def rotary_tables(block_size: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of `rotate`, each T x 1 x D, fp32."""
    rates = ROPE_BASE ** -torch.arange(0, width, 2, dtype=torch.float64).div(width)
    angles = torch.arange(block_size, dtype=torch.float64)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: column i of each head (B x T x H x D) is turned against column i + D/2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, normed queries and keys, and the first block's values mixed in."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)

    def forward(
        self, x: Tensor, first: Tensor | None, value: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x: B x T x C, normed. `first`: the first block's values (B x T x H x D), None there. Also returns these."""
        B, T, C = x.shape
        qk, v = self.qkv(x).split((2 * C, C), dim=2)
        v = v.view(B, T, self.n_head, -1)
        if first is None:
            first = v
        else:
            v = torch.addcmul(v, first, value.to(v.dtype))
        qk = norm(rotate(qk.view(B, T, 2 * self.n_head, -1), cos, sin), qk.dtype)  # turning changes no length
        q, k = qk.split(self.n_head, dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C)), first


class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them, four times as wide inside."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(squared_relu(self.up(x)))


class Block(nn.Module):
    """x + skip·x0, then + attention(norm(x)), then + mlp(norm(x))."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(MIX))  # skip and value
        self.attention = Attention(n_embd, n_head)
        self.mlp = MLP(n_embd)

    def forward(
        self, x: Tensor, x0: Tensor, first: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x, x0: B x T x C, fp32; the dtype of `cos` is that of the matrix products."""
        skip, value = self.mix.unbind()
        x = torch.addcmul(x, x0, skip)
        y, first = self.attention(norm(x, cos.dtype), first, value, cos, sin)
        x = x + y
        return x + self.mlp(norm(x, cos.dtype)), first


class ModernGPT(LanguageModel):
    """The model. What adds to the residual stream starts at zero, and so does the head: the first loss is ln V."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        c = config
        self.embedding = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList([Block(c.n_embd, c.n_head) for _ in range(c.n_layer)])
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        cos, sin = rotary_tables(c.block_size, c.n_embd // c.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_init)
        nn.init.zeros_(self.lm_head.weight)

    def hidden(self, idx: Tensor) -> Tensor:
        """The normed last hidden states, B x T x C, of token ids idx, B x T; in autocast's dtype where that is on."""
        T, device = idx.shape[1], idx.device.type
        assert self.block_size >= T, f"context of {T} tokens, the model has {self.block_size} positions"
        embedded = self.embedding(idx)
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embedded.dtype
        tables: Any = self.cos, self.sin
        cos, sin = (table[:T].to(low) for table in tables)
        x = x0 = norm(embedded, embedded.dtype)
        first = None
        for block in self.blocks:
            if self.checkpointing and self.training:
                x, first = checkpoint(block, x, x0, first, cos, sin, use_reentrant=False)
            else:
                x, first = block(x, x0, first, cos, sin)
        return norm(x, low)


def _init(module: nn.Module) -> None:
    """Uniform with variance 1 / inputs for what reads the residual stream, zero for what writes to it."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, Attention | MLP):
        reads, writes = (module.qkv, module.out) if isinstance(module, Attention) else (module.up, module.down)
        bound = math.sqrt(3 / reads.in_features)
        nn.init.uniform_(reads.weight, -bound, bound)
        nn.init.zeros_(writes.weight)
