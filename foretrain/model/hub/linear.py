"""Linear layers as fine-tuning has them: plain, in x out as GPT-2 keeps them, in 4 bits, and with a LoRA adapter.

Each computes what transformers', bitsandbytes' and peft's do, in their order, so that it saves and allocates the same:
transformers pytorch_utils.py (Conv1D), bitsandbytes autograd/_functions.py (MatMul4Bit), peft tuners/lora/layer.py.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Adapter(NamedTuple):
    """What an adapter is made of. `wide`: its weights are fp32, as peft makes them beside half-precision ones."""

    rank: int
    dropout: float
    wide: bool
    dora: bool = False


class Conv1D(nn.Module):
    """x·W + b with W in x out."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.n_out = n_out

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return torch.addmm(self.bias, rows, self.weight).view(*x.shape[:-1], self.n_out)


class _Matmul4Bit(torch.autograd.Function):
    """x·Wᵀ + b where W is made from 4 bits for each matmul, forward and backward, and let go after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Linear4bit") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return F.linear(grads[0], ctx.layer.dequantized(grads[0].dtype).t()), None


class Linear4bit(nn.Module):
    """A frozen linear layer in 4 bits (NF4, arXiv:2305.14314) that gives the dtype of its input.

    It has no values: only its sizes are known. `packed`: bytes of two weights each; absmax: a scale for 64 of them.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.shape = (n_out, n_in)
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight, out x in, in this dtype."""
        return torch.empty(self.shape, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        dtype, device = x.dtype, x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        out: Tensor = _Matmul4Bit.apply(x, self)
        return out.to(dtype)


class Lora(nn.Module):
    """A layer with an adapter: layer(x) + B(A(dropout(x))) · scale (arXiv:2106.09685)."""

    def __init__(self, layer: nn.Module, n_in: int, n_out: int, adapter: Adapter) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(n_in, adapter.rank, bias=False)
        self.lora_B = nn.Linear(adapter.rank, n_out, bias=False)
        self.lora_dropout = nn.Dropout(adapter.dropout) if adapter.dropout else None
        self.scaling = 1.5
        self.quantized = isinstance(layer, Linear4bit)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.quantized:
            return self.over_4bit(x, result.clone())
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.dropped(x))) * self.scaling
        return result.to(dtype)

    def over_4bit(self, x: Tensor, result: Tensor) -> Tensor:
        """The same over 4 bits: only without autocast is the input cast."""
        if torch.is_autocast_enabled(x.device.type):
            return result + self.lora_B(self.lora_A(self.dropped(x))) * self.scaling
        x = x.to(self.lora_A.weight.dtype)
        output = self.lora_B(self.lora_A(self.dropped(x))) * self.scaling
        output = output.to(result.dtype)
        return result + output

    def dropped(self, x: Tensor) -> Tensor:
        """What the adapter takes of the layer's input."""
        return x if self.lora_dropout is None else self.lora_dropout(x)
