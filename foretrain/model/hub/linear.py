"""Linear layers of fine-tuning, plain, in 4 or 8 bits, and with a LoRA adapter, that save and allocate as in
transformers pytorch_utils.py (Conv1D), bitsandbytes autograd/_functions.py (MatMul4Bit) and backends/default/ops.py
(gemm_4bit), peft tuners/lora/layer.py."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.model.hub.kernels import launch
from foretrain.model.hub.unsloth import Adapted

BLOCK = 64  # weights in 4 bits that share a scale


class Adapter(NamedTuple):
    """`wide`: the adapter's weights are fp32, as peft makes them beside half-precision ones."""

    rank: int
    dropout: float
    wide: bool
    dora: bool = False


class Conv1D(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.n_out = n_out

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return torch.addmm(self.bias, rows, self.weight).view(*x.shape[:-1], self.n_out)


class Packed(NamedTuple):
    """How weights are packed. `compute`: the dtype of matmuls; `stored`: before packing; `nested`: scales are in 8
    bits; `bits`: 4, or 8 as LLM.int8; `holds`: an 8-bit layer holds its input outside checkpoints (MatMul8bitLt)."""

    compute: Any
    stored: Any
    nested: bool = True
    bits: int = 4
    holds: bool = False


class _Matmul4Bit(torch.autograd.Function):
    """x·Wᵀ + b where W is unpacked from 4 bits for each matmul, forward and backward, and freed after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Linear4bit") -> Tensor:
        ctx.layer = layer
        scales = layer.scales()
        return _product(x, layer.weight(x.dtype), layer.bias, scales)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return F.linear(grads[0], ctx.layer.dequantized().to(grads[0].dtype).t()), None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


class Linear4bit(nn.Module):
    """A frozen linear layer in 4 bits (NF4, arXiv:2305.14314): sizes only, two weights a byte, a scale for 64."""

    def __init__(self, n_in: int, n_out: int, bias: bool, packed: Packed) -> None:
        super().__init__()
        self.shape, self.packed = (n_out, n_in), packed
        self.place = torch.empty(self.shape, dtype=packed.stored)  # owned by the run, not by a program (simulated.py)
        self.in_place_of_all = False  # whether one of unsloth's functions runs it
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def weight(self, dtype: Any) -> Tensor:
        return torch.empty(self.shape, dtype=dtype)

    def scales(self) -> Tensor | None:
        if not self.packed.nested:
            return None
        made = torch.empty((-(-self.shape[0] * self.shape[1] // BLOCK),), dtype=torch.float32)
        return made + 1.0

    def dequantized(self) -> Tensor:
        """Return the weight in its dtype before packing (bitsandbytes functional.py, dequantize_4bit)."""
        scales = self.scales()
        found = self.weight(self.packed.stored)
        del scales
        return found

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(self.packed.compute)
        out: Tensor = _Matmul4Bit.apply(x, self)
        return out.to(dtype)

    def dense(self, shared: bool) -> Tensor:
        """Return the weight as unsloth's kernel makes it, scales included; `shared`: in one buffer for all layers."""
        if not shared:
            return self.weight(self.packed.stored)
        launch("dequantize", self.place)
        return self.place


class _Matmul8Bit(torch.autograd.Function):
    """x·Wᵀ + b over weights in 8 bits (bitsandbytes MatMul8bitLt), of the rounded input. Outliers are left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Linear8bit") -> Tensor:
        ctx.layer = layer
        if layer.packed.holds:
            ctx.input = x
        else:
            ctx.save_for_backward(x)
        rounded = torch.empty(x.shape, dtype=torch.int8)
        shape = (*x.shape[:-1], layer.shape[0])
        summed = torch.empty(shape, dtype=torch.int32)
        out = torch.empty(shape, dtype=torch.float16)
        del rounded, summed
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return F.linear(grads[0], ctx.layer.weight(grads[0].dtype).t()), None


class Linear8bit(Linear4bit):
    """A frozen linear layer in 8 bits (LLM.int8, arXiv:2208.07339), with one scale per row."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Matmul8Bit.apply(x, self)
        return out


class Lora(nn.Module):
    """layer(x) + B(A(dropout(x))) · scale (arXiv:2106.09685); the layer alone while it is `off`."""

    off = False

    def __init__(self, layer: nn.Module, n_in: int, n_out: int, adapter: Adapter) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(n_in, adapter.rank, bias=False)
        self.lora_B = nn.Linear(adapter.rank, n_out, bias=False)
        self.lora_dropout = nn.Dropout(adapter.dropout) if adapter.dropout else None
        self.scaling = 1.5
        self.quantized = isinstance(layer, Linear4bit)
        self.lora_magnitude = nn.Parameter(torch.ones(n_out)) if adapter.dora else None

    def forward(self, x: Tensor) -> Tensor:
        if self.off:
            return self.base_layer(x)
        if self.quantized:
            if isinstance(self.base_layer, Linear8bit):
                return self.over_4bit(x, self.base_layer(x))
            return self.over_4bit(x, self.base_layer(x).clone())
        result = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        if self.lora_magnitude is not None:
            result = result + self.turned(x, result, self.lora_magnitude)
        else:
            result = result + self.lora_B(self.lora_A(self.dropped(x))) * self.scaling
        return result.to(dtype)

    def adapted(self) -> Adapted | None:
        """Return it as unsloth's functions take it; None with a bias or another adapter, which they do not take."""
        layer: Any = self.base_layer
        if layer.bias is not None or self.lora_magnitude is not None or isinstance(layer, Conv1D):
            return None
        dense = layer.dense if self.quantized else lambda shared: layer.weight
        p = self.lora_dropout.p if self.lora_dropout is not None and self.training else 0.0
        return Adapted(dense, self.lora_A.weight, self.lora_B.weight, p)

    def turned(self, x: Tensor, result: Tensor, magnitude: Tensor) -> Tensor:
        """Return DoRA's term (arXiv:2402.09353, peft tuners/lora/dora.py): rows of weight and adapter get a learned
        length, which the graph does not have."""
        layer: Any = self.base_layer
        drops = self.lora_dropout is not None and self.training
        if drops:
            x = self.dropped(x)
        product = self.product()
        product = product.to(x.dtype)
        weight = layer.weight.to(x.dtype)
        weight = weight.t() if isinstance(layer, Conv1D) else weight
        length = self.length(weight, product.detach())
        scale = (magnitude / length).view(1, -1)
        learned = self.lora_B(self.lora_A(x))
        base = result if layer.bias is None or drops else result - layer.bias
        if drops:
            base = F.linear(x, weight)
        return (scale - 1) * base + scale * learned * self.scaling

    def product(self) -> Tensor:
        weight = self.lora_A.weight
        ones = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        product: Tensor = self.lora_B(self.lora_A(ones)).t()
        return product

    def length(self, weight: Tensor, product: Tensor) -> Tensor:
        weight = weight + self.scaling * product
        return torch.linalg.vector_norm(weight, dim=1).to(weight.dtype)

    def over_4bit(self, x: Tensor, result: Tensor) -> Tensor:
        """Apply the adapter over 4 bits: the input is cast only without autocast."""
        if torch.is_autocast_enabled(x.device.type):
            return result + self.lora_B(self.lora_A(self.dropped(x))) * self.scaling
        x = x.to(self.lora_A.weight.dtype)
        output = self.lora_B(self.lora_A(self.dropped(x))) * self.scaling
        output = output.to(result.dtype)
        return result + output

    def dropped(self, x: Tensor) -> Tensor:
        return x if self.lora_dropout is None else self.lora_dropout(x)
