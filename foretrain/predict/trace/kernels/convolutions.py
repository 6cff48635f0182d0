"""What a convolution takes beside its results: in PyTorch's own kernels exactly, in cuDNN as a range.

PyTorch runs the first way that cuDNN proposes, with the workspace that it wants. With `torch.backends.cudnn.benchmark`
it measures all of them in one buffer, and keeps the fastest (aten/src/ATen/native/cudnn/Conv_v8.cpp). Neither limits
the size: where memory is short, the next way is tried. Which ways there are only cuDNN knows, so a trace has none of
it or the most.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.base.units import MIB
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels.reductions import reduction_buffers
from foretrain.predict.trace.tracer import Result, Step

OPS = ("convolution", "convolution_backward")
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
NOTE = (
    "convolutions run in cuDNN, which alone knows its workspaces: the lower end is without, the upper end has room for "
    "copies of what each convolution reads and writes"
)


def in_cudnn(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether cuDNN takes a convolution on the card, and not PyTorch's own kernel
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
    """The most that cuDNN wants: what is read and written once more in another layout, twice over, and partial sums of
    the weight's gradient. Measuring also tries ways with a matrix of all patches.

    Of 6,000 of cuDNN 9.20's own answers, for cards that are not there, 99.6 % want at most this
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
    """The arguments of both ops, without those that decide nothing here."""

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
        """All patches of one sample (aten/src/ATen/native/cuda/ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu,
        NaiveDilatedConvolution.cu); kernels of single channels need none."""
        if self.groups > 1:
            return 0
        small = self.x if self.transposed else self.y
        return math.prod(self.weight.shape[1:]) * math.prod(small.shape[2:]) * self.x.element_size()

    def is_dilated(self) -> bool:
        """Whether the kernel for dilated ones runs, which also does those of volumes."""
        return not self.transposed and (self.x.dim() == 5 or max(self.dilation) > 1)


def asked(op: str, args: tuple[Any, ...], out: Any) -> Convolution:
    """Of convolution (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups) or its
    backward pass (gradient, input, weight, bias sizes, stride, …, groups, mask)."""
    if op == "convolution":
        return Convolution(args[0], args[1], out, args[3], args[4], args[5], args[6], args[8])
    return Convolution(args[1], args[2], args[0], args[4], args[5], args[6], args[7], args[9])


def steps(
    card: Card, op: str, args: tuple[Any, ...], out: Any, *, upper: bool, product: Callable[[], list[Step]]
) -> list[Step]:
    """What the op allocates, in order; `upper`: with the most that cuDNN may take, else with nothing of it. `product`:
    what a matrix product takes, as PyTorch's own kernels do some."""
    found = asked(op, args, out)
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


# -- layouts -----------------------------------------------------------------------------------------------


def _format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """cuDNN's layout of a convolution: channels last where its input or its weight has it
    (aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format)."""
    last = CHANNELS_LAST.get(x.dim())
    if last is None or x.dtype == torch.float64:
        return torch.contiguous_format
    return last if any(_is_channels_last(t, last) for t in (x, weight)) else torch.contiguous_format


def _is_channels_last(t: Tensor, last: torch.memory_format) -> bool:
    return t.is_contiguous(memory_format=last) and not t.is_contiguous()


def _copied(tensors: tuple[Tensor, ...], wanted: torch.memory_format) -> list[Step]:
    """Bytes of those that are laid out otherwise."""
    return [t.nbytes for t in tensors if not t.is_contiguous(memory_format=wanted)]


def patch(patches: Patches) -> None:
    """Fake results are laid out as cuDNN would, where this build of torch has none."""
    name = "_conv_determine_backend_memory_format"
    ask: Callable[..., torch.memory_format] = getattr(torch._C, name)

    def wanted(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        is_here = x.is_cuda and torch.backends.cudnn.enabled
        return _format(x, weight) if is_here else ask(x, weight, backend)

    patches.set(torch._C, name, wanted)
