"""What each optimizer of TrainingArguments keeps on the card, and takes for a moment. No torch.

torch/optim/adamw.py and its foreach and fused kernels; bitsandbytes optim/optimizer.py (states in 8 bits with an fp32
scale for 256 of them, but fp32 below 4,096 elements; paged ones lie in managed memory, which PyTorch does not count);
transformers trainer_optimizer.py (8-bit optimizers keep the states of an embedding in fp32) and optimization.py,
Adafactor; torch/optim/_muon.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from foretrain.config.finetune.options import Optim
from foretrain.predict.estimate.kernel_buffers import Dimension, Processors, reduction_bytes

Shape = tuple[int, ...]
SMALL, SCALED = 4096, 256  # bitsandbytes: states below so many elements stay fp32; elements that share a scale


Passing = Callable[[Sequence[tuple[Shape, int]], Processors | None], Sequence[int]]


class OptimizerMemory(NamedTuple):
    """`states`: bytes of a parameter's state tensors; `paged`: in managed memory; `passing`: bytes for a moment in a
    step, of trained parameters' (shape, bytes an element) and the card's processors, None on a CPU."""

    states: Callable[[Shape, int], Sequence[int]]
    passing: Passing = lambda parameters, processors: ()
    paged: bool = False
    embedding: Callable[[Shape, int], Sequence[int]] | None = None  # states of an embedding, where they are others
    shared: tuple[int, ...] = ()  # what all parameters share: the codes of 8-bit states
    passing_on_cpu: Passing | None = None  # where it is another


def _nothing(shape: Shape, width: int) -> Sequence[int]:
    return ()


def _adamw(shape: Shape, width: int) -> Sequence[int]:
    """Two moments in the dtype of the weight."""
    return (width * math.prod(shape),) * 2


def _adamw_fused(shape: Shape, width: int) -> Sequence[int]:
    """The same, and the step count, which a fused kernel reads on the card."""
    return (4, *_adamw(shape, width))


def _foreach(parameters: Sequence[tuple[Shape, int]], processors: Processors | None) -> Sequence[int]:
    """The roots of all second moments at once, each a tensor."""
    return [width * math.prod(shape) for shape, width in parameters]


def _one_by_one(parameters: Sequence[tuple[Shape, int]], processors: Processors | None) -> Sequence[int]:
    """The root of a second moment, the same divided, and what was made for the weight before (adamw.py,
    _single_tensor_adamw); matrices come first, as they have a weight decay."""
    most = before = 0
    for shape, width in sorted(parameters, key=lambda each: len(each[0]) < 2):
        nbytes = width * math.prod(shape)
        most, before = max(most, 2 * nbytes + before), nbytes
    return (most,)


def _adamw_8bit(shape: Shape, width: int) -> Sequence[int]:
    n = math.prod(shape)
    return (4 * n,) * 2 if n < SMALL else (n, n, 4 * -(-n // SCALED), 4 * -(-n // SCALED))


def _adamw_32bit(shape: Shape, width: int) -> Sequence[int]:
    return (4 * math.prod(shape),) * 2


def _adafactor(shape: Shape, width: int) -> Sequence[int]:
    """A mean of squares a row and a column; of vectors all of them."""
    if len(shape) < 2:
        return (4 * math.prod(shape),)
    return 4 * math.prod(shape[:-1]), 4 * math.prod((*shape[:-2], shape[-1]))


def _adafactor_passing(parameters: Sequence[tuple[Shape, int]], processors: Processors | None) -> Sequence[int]:
    """Of a weight in half precision its gradient and itself in fp32, of each the square and the update; the update of
    the weight before stays until then, and its copies until this one has its own. Matrices come first, as they have a
    weight decay. On a card the means of a matrix's squares take memory of their own."""
    most: list[int] = []
    before, copied = 0, False
    for shape, width in sorted(parameters, key=lambda each: len(each[0]) < 2):
        size, casts = 4 * math.prod(shape), width < 4
        moments = [[size] * (4 if casts else 2) + [before], [size, *[before] * (3 if copied else 1)]]
        if processors and len(shape) == 2:
            rows, columns = Dimension(shape[0], shape[1]), Dimension(shape[1], 1)
            for summed, kept in ((columns, rows), (rows, columns)):
                inside = reduction_bytes(processors, [summed], [kept], 4)
                moments.append([*[size] * (3 if casts else 1), *inside])
        most = max(most, *moments, key=sum)
        before, copied = size, casts
    return most


def _muon(shape: Shape, width: int) -> Sequence[int]:
    """A momentum for matrices; torch.optim.Muon takes no other parameters, which AdamW has."""
    return (width * math.prod(shape),) if len(shape) == 2 else _adamw(shape, width)


def _muon_passing(parameters: Sequence[tuple[Shape, int]], processors: Processors | None) -> Sequence[int]:
    """The largest matrix in bf16, its square and their product (Newton-Schulz)."""
    return (max((2 * (3 * math.prod(s) + 2 * min(s) ** 2) for s, _ in parameters if len(s) == 2), default=0),)


OPTIMIZERS: dict[Optim, OptimizerMemory] = {
    "adamw_torch_fused": OptimizerMemory(_adamw_fused),
    "adamw_torch": OptimizerMemory(_adamw, _foreach, passing_on_cpu=_one_by_one),
    "adamw_8bit": OptimizerMemory(_adamw_8bit, embedding=_adamw_32bit, shared=(1024, 1024)),
    "paged_adamw_8bit": OptimizerMemory(_adamw_8bit, paged=True, embedding=_adamw_32bit, shared=(1024, 1024)),
    "paged_adamw_32bit": OptimizerMemory(_adamw_32bit, paged=True),
    "adafactor": OptimizerMemory(_adafactor, _adafactor_passing),
    "muon": OptimizerMemory(_muon, _muon_passing),
    "sgd": OptimizerMemory(_nothing),
}

Width = Callable[[int], float]
# Bytes that a step reads and writes for each element of a trained weight of this width.
TRAFFIC: dict[Optim, tuple[Width, Width]] = {
    "adamw_torch_fused": (lambda width: 4 * width, lambda width: 3 * width),
    "adamw_torch": (lambda width: 14 * width, lambda width: 9 * width),
    "adamw_8bit": (lambda width: 2 * width + 2, lambda width: width + 2),
    "paged_adamw_8bit": (lambda width: 2 * width + 2, lambda width: width + 2),
    "paged_adamw_32bit": (lambda width: 2 * width + 8, lambda width: width + 8),
    "adafactor": (lambda width: 2 * width + 16, lambda width: width + 12),
    "muon": (lambda width: 3 * width + 24, lambda width: 2 * width + 12),
    "sgd": (lambda width: 2 * width, lambda width: width),
}
