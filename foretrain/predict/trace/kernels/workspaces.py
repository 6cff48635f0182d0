"""What convolutions, matmuls and recurrent layers allocate beside their results."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from foretrain.base.units import MIB
from foretrain.predict.trace.card.guard import StandInError
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels.reductions import reduction_buffers
from foretrain.predict.trace.kernels.values import place_now
from foretrain.predict.trace.tracer import Result, Step

# Of a convolution: exact for PyTorch's own kernels, a range for cuDNN. PyTorch runs cuDNN's first plan with the
# workspace that it wants; with `torch.backends.cudnn.benchmark` it measures all in one buffer and takes the fastest
# (aten/src/ATen/native/cudnn/Conv_v8.cpp). Where memory is short, the next is tried. Only cuDNN knows its plans, so a
# trace has no workspace or the largest.

OPS = ("convolution", "convolution_backward")
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
NOTE = (
    "convolutions run in cuDNN, which alone knows its workspaces: the lower end is without, the upper end has room for "
    "copies of what each convolution reads and writes"
)


def in_cudnn(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether cuDNN runs a convolution on the card, and not PyTorch's own kernel
    (aten/src/ATen/native/Convolution.cpp, use_cudnn; those of single channels are depthwise, unless they have channels
    last or, but for volumes, half precision).
    """
    if not torch.backends.cudnn.enabled or x.dim() > 5:
        return False
    depthwise = groups > 1 and groups == x.shape[1] and weight.shape[0] % x.shape[1] == 0
    if not depthwise or _format(x, weight) != torch.contiguous_format:
        return True
    return x.dtype == torch.float16 and x.dim() < 5


def workspace_bytes(x: Tensor, weight: Tensor, y: Tensor, groups: int, *, benchmark: bool) -> int:
    """Return the most that cuDNN wants: input and output once more in another layout, twice over, and partial sums of
    the weight's gradient. Measuring also tries plans with a matrix of all patches.

    Of 6,000 of cuDNN 9.20's own answers, for stand-in cards, 99.6% want at most this
    (tests/cuda_build/convolutions.py).
    """
    layouts = 2 * (_padded_bytes(x) + _padded_bytes(y))
    taps, wide = math.prod(weight.shape[2:]), max(weight.shape[1] * groups, x.shape[1])
    found = layouts + max(8 * 4 * _up(weight.shape[0]) * _up(wide) * taps, 64 * MIB)
    if benchmark:
        patches = x.shape[0] * taps * 4
        small, large = sorted((math.prod(x.shape[2:]), math.prod(y.shape[2:])))
        narrow, outer = weight.shape[1], weight.shape[0]
        found += patches * (narrow * small + outer * large)
    return found


def _padded_bytes(t: Tensor) -> int:
    """Tensor cores read channels by eights."""
    return t.element_size() * t.numel() // t.shape[1] * _up(t.shape[1])


def _up(channels: int) -> int:
    return -(-channels // 8) * 8


class Convolution(NamedTuple):
    x: Tensor
    weight: Tensor
    y: Tensor  # or its gradient, which has its shape
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    groups: int

    @property
    def in_cudnn(self) -> bool:
        return in_cudnn(self.x, self.weight, 1 if self.transposed else self.groups)

    def workspace(self, upper: bool) -> list[int]:
        if not upper:
            return []
        benchmark = torch.backends.cudnn.benchmark
        return [workspace_bytes(self.x, self.weight, self.y, self.groups, benchmark=benchmark)]

    def columns_bytes(self) -> int:
        """Return the bytes of all patches of one sample (aten/src/ATen/native/cuda/ConvolutionMM2d.cu,
        NaiveConvolutionTranspose2d.cu, NaiveDilatedConvolution.cu); kernels of single channels need none.
        """
        if self.groups > 1:
            return 0
        small = self.x if self.transposed else self.y
        return math.prod(self.weight.shape[1:]) * math.prod(small.shape[2:]) * self.x.element_size()

    def is_dilated(self) -> bool:
        """Return whether the kernel for dilated ones runs, which also does those of volumes."""
        return not self.transposed and (self.x.dim() == 5 or max(self.dilation) > 1)


def convolution_of(op: str, args: tuple[Any, ...], out: Any) -> Convolution:
    """Read convolution (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups) or its
    backward pass (gradient, input, weight, bias sizes, stride, …, groups, mask).
    """
    if op == "convolution":
        return Convolution(args[0], args[1], out, args[3], args[4], args[5], args[6], args[8])
    return Convolution(args[1], args[2], args[0], args[4], args[5], args[6], args[7], args[9])


def steps(
    card: Card, op: str, args: tuple[Any, ...], out: Any, *, upper: bool, product: Callable[[], list[Step]]
) -> list[Step]:
    """Return what the op allocates, in order; `upper`: with cuDNN's largest workspace, else with none. `product`: the
    temporaries of a matmul, which some of PyTorch's own kernels run.
    """
    found = convolution_of(op, args, out)
    if op == "convolution":
        return _forward(found, upper, product, biased=args[2] is not None)
    mask = args[10]
    numbers: list[Step] = [Result(sum(mask[:each])) for each in range(3)]  # those not wanted are not returned
    return (
        _backward(card, found, mask, numbers, upper)
        if found.in_cudnn
        else _backward_here(found, mask, numbers, product)
    )


def _forward(asked: Convolution, upper: bool, product: Callable[[], list[Step]], *, biased: bool) -> list[Step]:
    if asked.in_cudnn:
        copies = _copied((asked.x, asked.weight), _format(asked.x, asked.weight))
        return [*copies, Result(0), *asked.workspace(upper)]
    columns, copy = asked.columns_bytes(), _copied((asked.x,), torch.contiguous_format)
    if not columns:
        return [*copy, Result(0)]
    unfolds = math.prod(asked.weight.shape[2:]) > 1 or max(asked.stride) > 1 or max(asked.padding) > 0
    ones = math.prod(asked.y.shape[2:]) * asked.x.element_size()  # by which a bias is added
    found: list[Step] = [columns] if unfolds or asked.transposed else []
    return [*copy, Result(0), *found, *([ones] if biased and asked.transposed else []), *product()]


def _backward(card: Card, asked: Convolution, mask: list[bool], results: list[Step], upper: bool) -> list[Step]:
    gradient = asked.y
    found: list[Step] = [*_copied((gradient, asked.x, asked.weight), _format(asked.x, asked.weight))]
    room = asked.workspace(upper)
    for number in (0, 1):
        if mask[number]:
            found += [results[number], *room, *(-nbytes for nbytes in room)]
    if mask[2]:
        found += [results[2], *reduction_buffers(card, "sum", gradient, [d for d in range(gradient.dim()) if d != 1])]
    return found


def _backward_here(
    asked: Convolution, mask: list[bool], results: list[Step], product: Callable[[], list[Step]]
) -> list[Step]:
    columns = asked.columns_bytes()
    copy = _copied((asked.x, asked.y), torch.contiguous_format)
    if not columns:
        bias = results[2:][: mask[2]]
        if asked.x.dim() == 5:
            return [*(results[number] for number in (0, 1) if mask[number]), *copy, *bias]
        gone = [-each for each in copy if isinstance(each, int)]
        return [*copy, *(results[number] for number in (1, 0) if mask[number]), *gone, *bias]
    if asked.is_dilated():
        return [*copy, *(results[number] for number in range(3) if mask[number]), columns, *product()]
    first: list[Step] = [results[0], columns, *product()] if mask[0] else []
    sums = [results[number] for number in (2, 1) if mask[number]]
    if asked.transposed:
        gone = [-columns, *(-each for each in copy if isinstance(each, int))] if first else []
        rest = [*reversed(sums), *copy, columns, *([] if first else product())] if sums else []
        return [*(copy if first else []), *first, *gone, *rest]
    return [*copy, *first, *sums, *([] if first else [columns, *product()])]


def _format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return cudnn_conv_suggest_memory_format: channels last where one has it (ATen/native/ConvUtils.h)."""
    last = CHANNELS_LAST.get(x.dim())
    if last is None or x.dtype == torch.float64:
        return torch.contiguous_format
    return last if any(_is_channels_last(t, last) for t in (x, weight)) else torch.contiguous_format


def _is_channels_last(t: Tensor, last: torch.memory_format) -> bool:
    return t.is_contiguous(memory_format=last) and not t.is_contiguous()


def _copied(tensors: tuple[Tensor, ...], wanted: torch.memory_format) -> list[Step]:
    return [t.nbytes for t in tensors if not t.is_contiguous(memory_format=wanted)]


def patch_convolutions(patches: Patches) -> None:
    """Lay fake results out as cuDNN would, where this build of torch has none."""
    name = "_conv_determine_backend_memory_format"
    ask: Callable[..., torch.memory_format] = getattr(torch._C, name)

    def wanted(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        is_here = x.is_cuda and torch.backends.cudnn.enabled
        return _format(x, weight) if is_here else ask(x, weight, backend)

    patches.set(torch._C, name, wanted)


# Gradients of torch.prod and cumprod where no element is zero, for which PyTorch looks. In a trace it takes a path that
# is right for zeros, too, with up to twice the memory (torch/csrc/autograd/FunctionsManual.cpp, prod_backward and
# cumprod_backward).


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        out = make(x, *args, **kwargs)
        ctx.dim, ctx.keepdim = (*args, kwargs.get("dim"))[0], (*args, None, None)[1] or kwargs.get("keepdim")
        ctx.gradient = _of_prod if make.__name__ == "prod" else _of_cumprod
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.gradient(gradient, *ctx.saved_tensors, ctx.dim, ctx.keepdim), None, None, None


def _of_prod(gradient: Tensor, x: Tensor, out: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    if x.dim() == 0:
        return gradient.clone()
    if dim is not None and not keepdim:
        gradient, out = gradient.unsqueeze(dim), out.unsqueeze(dim)
    zeros = x == 0
    counts = None if dim is None else zeros.sum(dim, keepdim=True)
    if counts is None:
        del zeros  # of which it makes a list, an empty one
    else:
        counts.sum()
    return gradient * (out / x)


def _of_cumprod(gradient: Tensor, x: Tensor, out: Tensor, dim: int, keepdim: bool) -> Tensor:
    if x.numel() <= 1:
        return gradient
    weighted, zeros = out * gradient, x == 0
    zeros.any()
    return _summed_from_the_end(weighted, dim).div(x)


def _summed_from_the_end(weighted: Tensor, dim: int) -> Tensor:
    flipped = weighted.flip(dim)
    sums = flipped.cumsum(dim)
    return sums.flip(dim)


def patch_matmuls(patches: Patches) -> None:
    for owner in (torch, Tensor):
        for name in ("prod", "cumprod"):
            patches.set(owner, name, _with_gradient(getattr(owner, name)))


def _with_gradient(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        plain = args and isinstance(args[0], Tensor) and not kwargs.keys() - {"dim", "keepdim"}
        transformed = peek_interpreter_stack() is not None
        if transformed or not (plain and args[0].requires_grad and torch.is_grad_enabled()):
            return make(*args, **kwargs)
        return _Product.apply(args[0], make, args[1:], kwargs)

    return made


# LSTM, GRU and RNN: refused where cuDNN runs them on the card, else by PyTorch's own kernels for one step. A CPU build
# would decompose what is one cuDNN kernel, and a CUDA build fails without a card.

KEPT_BY_GRU = 5  # values of a GRU's step that its backward pass reads, for each hidden one


def patch_recurrent(patches: Patches, library: torch.library.Library) -> None:
    """`library`: of aten, where what has no fake kernel gets one."""
    owner = torch.nn.RNNBase
    for name in ("flatten_parameters", "check_input"):
        patches.set(owner, name, _refusing(getattr(owner, name)))
    library.impl("_thnn_fused_gru_cell", _gru_step, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_step_backward, "Meta")


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_or_call(module: torch.nn.RNNBase, *args: Any) -> Any:
        if torch.backends.cudnn.enabled and any(weight.is_cuda for weight in module.parameters()):
            raise StandInError(
                f"nn.{type(module).__name__} cannot be traced: on the card it runs in cuDNN, which tells nobody what "
                f"it allocates; with torch.backends.cudnn.enabled = False, here and in training, it can be, "
                f"at {place_now()}"
            )
        return method(module, *args)

    return refuse_or_call


def _gru_step(x: Tensor, hidden: Tensor, hx: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the new state and what is saved (aten/src/ATen/native/cuda/RNN.cu)."""
    rows, width = hx.shape
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(rows, KEPT_BY_GRU * width)


def _gru_step_backward(gradient: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return gradients of the gates from input and state, of the state, and of the biases: sums of the first two."""
    gates = kept.new_empty(kept.shape[0], 3 * kept.shape[1] // KEPT_BY_GRU)
    others = torch.empty_like(gates), torch.empty_like(gradient, memory_format=torch.contiguous_format)
    biases = (gates.new_empty(gates.shape[1]), gates.new_empty(gates.shape[1])) if has_bias else (None, None)
    return gates, *others, *biases
