"""Single operations in plain PyTorch, measured as Liger-Kernel's benchmark measures its PyTorch baselines.

Written from that benchmark's description: forward and backward ten times, the peak of each time, its median. Here
three times, as nothing changes after the second. The modules of transformers that it takes are written out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[], None]


def _back(forward: Callable[[], Tensor], gradient: Callable[[Tensor], Tensor]) -> Step:
    def step() -> None:
        out = forward()
        out.backward(gradient(out), retain_graph=True)

    return step


class Rms(nn.Module):
    """Llama's RMSNorm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down, self.activation = nn.Linear(inner, width, bias=False), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def cross_entropy(on: Any, n: int) -> Step:
    x = torch.randn(8 * 2048, n, requires_grad=True, device=on.device)
    target = torch.randint(n, (8 * 2048, 1), device=on.device).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return lambda: loss(x, target).backward()


def head_and_cross_entropy(on: Any, n: int) -> Step:
    width, vocab = 4096, 128256
    head = nn.Linear(width, vocab, bias=False, dtype=torch.bfloat16).to(on.device)
    others = nn.Linear(width, vocab, bias=False, dtype=torch.bfloat16).to(on.device)
    x = torch.randn(n, width, requires_grad=True, dtype=torch.bfloat16, device=on.device)
    target = torch.randint(vocab, (n, 1), device=on.device).squeeze(1)
    loss = nn.CrossEntropyLoss()

    def step(keep: nn.Module = others) -> None:
        loss(head(x), target).backward()

    return step


def layer_norm(on: Any, n: int) -> Step:
    others, norm = nn.LayerNorm(n).to(on.device), nn.LayerNorm(n, eps=1e-6).to(on.device)
    x = torch.randn(4096, n, device=on.device)
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return _back(lambda keep=others: norm(x), lambda out: dy)


def rms_norm(on: Any, n: int) -> Step:
    others, norm = Rms(n).to(on.device), Rms(n).to(on.device)
    x = torch.randn(2048, n, dtype=torch.bfloat16, device=on.device)
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return _back(lambda keep=others: norm(x), lambda out: dy)


def _gated(on: Any, batch: int, n: int, activation: Callable[[Tensor], Tensor]) -> Step:
    x = torch.randn(batch, n, 4096, device=on.device, dtype=torch.bfloat16, requires_grad=True)
    layer = Gated(4096, 11008, activation).to(on.device).to(torch.bfloat16)
    return _back(lambda: layer(x), torch.randn_like)


def geglu(on: Any, n: int) -> Step:
    return _gated(on, 8, n, lambda x: F.gelu(x, approximate="tanh"))


def swiglu(on: Any, n: int) -> Step:
    return _gated(on, 4, n, F.silu)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


def _rope(on: Any, width: int, length: int) -> Step:
    """Rotary positions of 32 heads of queries and 8 of keys, as transformers 4.44 computes them."""
    head = width // 32
    frequency = 1.0 / 10000 ** (torch.arange(0, head, 2, dtype=torch.int64).float().to(on.device) / head)
    new: dict[str, Any] = {"device": on.device, "requires_grad": True, "dtype": torch.bfloat16}
    q = torch.randn((1, length, 32, head), **new).transpose(1, 2)
    k = torch.randn((1, length, 8, head), **new).transpose(1, 2)
    dq, dk = torch.randn_like(q, device=on.device, dtype=torch.bfloat16), torch.randn_like(k, device=on.device)
    positions = torch.arange(length, device=on.device).unsqueeze(0)
    with torch.no_grad():
        angles = (frequency[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos().to(torch.bfloat16), both.sin().to(torch.bfloat16)
    del angles, both

    def step(keep: tuple[Tensor, ...] = (frequency, positions)) -> None:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        out = (q * c + _turned(q) * s, k * c + _turned(k) * s)
        torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return step


def rope_of_width(on: Any, n: int) -> Step:
    return _rope(on, n, 2048)


def rope_of_length(on: Any, n: int) -> Step:
    return _rope(on, 8192, n)


def _of_one_row(on: Any, n: int, dtype: torch.dtype, op: Callable[[Tensor], Tensor]) -> Step:
    """The memory benchmark of these takes n numbers, not rows of n."""
    x = torch.randn(n, device=on.device, dtype=dtype, requires_grad=True)
    return _back(lambda: op(x), torch.ones_like)


def softmax_fp32(on: Any, n: int) -> Step:
    return _of_one_row(on, n, torch.float32, lambda x: torch.softmax(x, -1))


def softmax_bf16(on: Any, n: int) -> Step:
    return _of_one_row(on, n, torch.bfloat16, lambda x: torch.softmax(x, -1))


def relu_squared(on: Any, n: int) -> Step:
    return _of_one_row(on, n, torch.bfloat16, lambda x: torch.square(F.relu(x)))


OPS: dict[str, Callable[[Any, int], Step]] = {
    op.__name__: op
    for op in (
        cross_entropy, head_and_cross_entropy, layer_norm, rms_norm, geglu, swiglu, rope_of_width, rope_of_length,
        softmax_fp32, softmax_bf16, relu_squared,
    )
}  # fmt: skip


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    step = OPS[settings["op"]](on, settings["n"])
    peaks = []
    for _ in range(3):
        torch.cuda.memory.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated())
    return {"peak": sorted(peaks)[1]}
