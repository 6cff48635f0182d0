"""What the blocks of decoders are made of, as transformers computes it: norms, activations, rotary positions, masks."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) · weight; the mean square is fp32 (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weighted(x, dtype)

    def weighted(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight * x.to(dtype)


class OlmoNorm(RMSNorm):
    def weighted(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return (self.weight * x).to(dtype)


class GemmaNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        output = self.scaled(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class BareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = (width,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape)


class FastNorm(nn.Module):
    def __init__(self, width: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def activation(name: str) -> Callable[[Tensor], Tensor]:
    known = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "gelu_new": gelu_new, "gelu_fast": gelu_fast}
    if name == "relu2":
        return lambda x: torch.pow(F.relu(x), 2)
    return known.get(name) or (lambda x: F.gelu(x, approximate="tanh"))


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, rotate: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    return (x * cos) + (rotate(x) * sin)


def apply_fp32_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos) + (rotate_pairs(x).float() * sin)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    B, K, T, D = x.shape
    x = x[:, :, None, :, :].expand(B, K, groups, T, D)
    return x.reshape(B, K * groups, T, D)


def rotary_tables(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    freqs = positions[..., None].float() * rates
    angles = torch.cat((freqs, freqs), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def window_mask(B: int, T: int, window: int, like: Tensor) -> Tensor:
    """Return which keys each query sees, B x 1 x T x T: those before it, `window` of them at most."""
    return torch.ones((B, 1, T, T), dtype=torch.bool, device=like.device).tril().triu(1 - window)


def mask_as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)
