"""The blocks' linear layers in 8 bits: FP8 with one scale per tensor, or INT8 with one scale per row.

FP8 (Micikevicius et al. 2022, arXiv:2209.05433): inputs and weights in e4m3, gradients of outputs in e5m2, which has
the wider range; the scale is that of this tensor's largest element, so nothing is remembered between steps. INT8: y =
x·Wᵀ and dx = dy·W on int8 with exact int32 sums. The weight gradient dyᵀ·x stays in the run's dtype: it sums over
tokens, whose gradients differ by orders of magnitude (benchmarks/results/precision_modes.json has both).

Saved for backward: the quantised input and weight, 1 byte per element instead of 2, so nothing is quantised twice.
Weights stay fp32 in the optimizer.

Letters: M tokens of a micro-batch, K inputs and N outputs of a layer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from foretrain.config.checks import MULTIPLE
from foretrain.hardware.catalogue import MatmulMode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Private names: torch has no public 8-bit matmuls.
_scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
_int_mm: Any = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
_SMALLEST = 1e-12  # a tensor of zeros has a scale too


def quantise_tensor(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (x in FP8, its fp32 scalar scale), by the largest element. Infinity or NaN in x make NaN."""
    low, high = torch.aminmax(x)
    scale = torch.maximum(-low, high).float().clamp(min=_SMALLEST) / torch.finfo(dtype).max
    return (x * scale.reciprocal()).to(dtype), scale


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x in INT8, fp32 scales of its rows, rows x 1), by the largest element of each row."""
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    scale = torch.maximum(-low, high).float().clamp(min=_SMALLEST) / 127
    return (x * scale.reciprocal()).round().to(torch.int8), scale


def _column_major(x: Tensor) -> Tensor:
    """Make columns contiguous, as 8-bit tensor cores want the second factor."""
    return x.t().contiguous().t()


class Fp8Matmul(torch.autograd.Function):
    """x (M x K), weight (N x K, fp32) -> x·Wᵀ (M x N) in `dtype`, all three matmuls of a step in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        low_x, scale_x = quantise_tensor(x, E4M3)
        low_weight, scale_weight = quantise_tensor(weight, E4M3)
        ctx.save_for_backward(low_x, scale_x, low_weight, scale_weight)
        ctx.dtypes = x.dtype, weight.dtype
        return _scaled_mm(
            low_x, low_weight.t(), scale_a=scale_x, scale_b=scale_weight, out_dtype=dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        low_x, scale_x, low_weight, scale_weight = ctx.saved_tensors
        grad, scale_grad = quantise_tensor(grads[0], E5M2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _scaled_mm(
                grad, _column_major(low_weight), scale_a=scale_grad, scale_b=scale_weight, out_dtype=ctx.dtypes[0]
            )
        if ctx.needs_input_grad[1]:
            grad_weight = _scaled_mm(
                grad.t().contiguous(), _column_major(low_x), scale_a=scale_grad, scale_b=scale_x,
                out_dtype=ctx.dtypes[1],
            )  # fmt: skip
        return grad_x, grad_weight, None


class Int8Matmul(torch.autograd.Function):
    """x (M x K), weight (N x K, fp32) -> x·Wᵀ (M x N) in `dtype`, with INT8 in forward and for the input's gradient.
    `all_three`: the weight's gradient in INT8 too. Scales along the summed dimension are multiplied into the other
    factor before that is quantised: dx = (dy·s_W)·W and dW = (dy·s_x)ᵀ·x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, all_three: bool) -> Tensor:
        low_x, scale_x = quantise_rows(x)
        low_weight, scale_weight = quantise_rows(weight)
        ctx.save_for_backward(low_x, scale_x, low_weight, scale_weight)
        ctx.dtypes, ctx.all_three = (x.dtype, weight.dtype), all_three
        return _int8_matmul(low_x, scale_x, low_weight.t(), scale_weight.t(), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        low_x, scale_x, low_weight, scale_weight = ctx.saved_tensors
        grad: Tensor = grads[0]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            low_grad, scale_grad = quantise_rows(grad * scale_weight.t())
            grad_x = _int8_matmul(low_grad, scale_grad, _column_major(low_weight), None, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            if ctx.all_three:
                low_grad, scale_grad = quantise_rows((grad * scale_x).t())
                grad_weight = _int8_matmul(low_grad.contiguous(), scale_grad, _column_major(low_x), None, ctx.dtypes[1])
            else:
                x = (low_x * scale_x).to(grad.dtype)
                grad_weight = (grad.t() @ x).to(ctx.dtypes[1])
        return grad_x, grad_weight, None, None


def _int8_matmul(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a·b with the scales of a's rows and b's columns; unscaled sums are beyond fp16's range."""
    sums = _int_mm(a, b) if a.device.type != "cpu" or cpu.is_exact() else _sums_in_fp32(a, b)
    y = sums * scale_a
    return (y if scale_b is None else y * scale_b).to(dtype)


EXACT_IN_FP32 = 2**24 // 127**2  # terms of two 8-bit integers whose sum fp32 always holds exactly


class Cpu:
    """Whether this processor's INT8 sums are exact; None until compared."""

    sums_are_exact: bool | None = None

    def is_exact(self) -> bool:
        """Return whether torch._int_mm is right here. Without VNNI, oneDNN adds two in 16 bits and overflows."""
        if self.sums_are_exact is None:
            with _disable_current_modes():  # a trace has no values to compare
                a = torch.full((32, 64), 127, dtype=torch.int8)
                a[::2, ::2] = -127
                self.sums_are_exact = torch.equal(_int_mm(a, a.t()), _sums_in_fp32(a, a.t()))
        return self.sums_are_exact


cpu = Cpu()


def _sums_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in 32-bit integers by fp32 matmuls of parts that it holds exactly: always right, and slow."""
    parts = zip(a.split(EXACT_IN_FP32, 1), b.split(EXACT_IN_FP32, 0), strict=True)
    with torch.autocast(a.device.type, enabled=False):
        return sum((one.float() @ other.float()).to(torch.int32) for one, other in parts)  # type: ignore[return-value]


class LowPrecisionLinear(nn.Linear):
    mode: MatmulMode
    active: bool
    all_three: bool

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if not self.active:
            return F.linear(x, self.weight, self.bias)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = x.reshape(-1, self.in_features)
        if self.mode == "fp8":
            y = Fp8Matmul.apply(rows, self.weight, dtype)
        else:
            y = Int8Matmul.apply(rows, self.weight, dtype, self.all_three)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)


def convert(blocks: nn.Module, mode: MatmulMode, *, all_three: bool = False) -> list[str]:
    """Switch every linear layer below `blocks` to `mode`; return the names of those whose sizes do not allow it."""
    if mode == "int8":
        cpu.is_exact()  # found out here, not while the model is compiled
    left = []
    for name, linear in blocks.named_modules():
        if type(linear) is not nn.Linear:
            continue
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            left.append(name)
            continue
        linear.__class__ = LowPrecisionLinear
        linear.mode, linear.active, linear.all_three = mode, True, all_three  # type: ignore[assignment]
    return left


def layers(model: nn.Module) -> list[tuple[str, LowPrecisionLinear]]:
    return [(name, part) for name, part in model.named_modules() if isinstance(part, LowPrecisionLinear)]


@contextlib.contextmanager
def without_low_precision(model: nn.Module) -> Iterator[None]:
    """Compute within without converted layers and fp16 sums."""
    found = layers(model)
    with fp16_accumulation(False):
        for _, layer in found:
            layer.active = False
        try:
            yield
        finally:
            for _, layer in found:
                layer.active = True


@contextlib.contextmanager
def fp16_accumulation(wanted: bool) -> Iterator[None]:
    """Sum matmuls of float16 on CUDA in float16 within, or not; for the whole process."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "allow_fp16_accumulation"):  # torch before 2.7
        yield
        return
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = wanted
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = before
