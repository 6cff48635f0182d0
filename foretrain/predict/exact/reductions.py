"""What a sum, a mean or a maximum takes for itself.

Two rules of PyTorch. aten/src/ATen/native/ReduceOpsUtils.h (make_reduction): the input is first converted to the dtype
of the sum. aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig): a reduction over many values is divided over threads,
then over warps, then over blocks; only the last of these needs memory, for each block's part and a counter.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.predict.exact.fake_card import Card

MOST_THREADS, WARP, VECTOR = 512, 32, 4
LEAST_A_THREAD, MOST_A_THREAD = 16, 256  # values
PAIR_BYTES = 16  # a value and its index
CONVERTED = {"sum", "mean", "prod", "nansum"}
REDUCTIONS = (*CONVERTED, "max", "min", "argmax", "argmin", "amax", "amin")


class Dimension(NamedTuple):
    """Of the tensor that is read: how many, and how far apart."""

    size: int
    stride: int


def as_large_as_the_input(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Bytes of what is made of the input first, on any device: logsumexp's maxima and exponentials, or the input in the
    dtype of the sum. Integers and booleans are summed in int64."""
    if op == "logsumexp" and (dims := _reduced(args[0], args[1])):
        x = args[0]
        rows = x.numel() // math.prod(x.shape[d] for d in dims)
        return [rows * x.element_size(), x.numel() * x.element_size()]
    if op not in CONVERTED or not isinstance(args[0], Tensor):
        return []
    x = args[0]
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    dtype = kwargs.get("dtype") or (x.dtype if exact else torch.int64)
    on_the_way = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32
    return [] if dtype == x.dtype or on_the_way else [x.numel() * dtype.itemsize]


def _reduced(x: Any, dims: Any) -> set[int]:
    """The dimensions that go, all for None or an empty list; {} where there is nothing to reduce."""
    if not isinstance(x, Tensor) or x.numel() == 0 or x.dim() == 0:
        return set()
    asked = list(dims) if isinstance(dims, list | tuple) else [dims]
    if dims is None or not asked:
        return set(range(x.dim()))
    return {d % x.dim() for d in asked} if all(type(d) is int for d in asked) else set()


def reduction_buffers(card: Card, op: str, tensor: Any, dims: Any) -> list[int]:
    """Bytes of partial results and of counters; [] where one block does each result. `dims`: None for all."""
    reduced = _reduced(tensor, dims)
    if not reduced:
        return []
    inner = _merged([Dimension(tensor.shape[d], tensor.stride(d)) for d in reduced])
    outer = _merged([Dimension(tensor.shape[d], tensor.stride(d)) for d in range(tensor.dim()) if d not in reduced])
    inputs, outputs = math.prod(d.size for d in inner), math.prod(d.size for d in outer)
    if inputs <= MOST_A_THREAD or not outputs:
        return []
    along = not outer or inner[0].stride < outer[0].stride  # neighbours in memory are summed together
    width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if along and inner[0].stride == 1 and inputs > 128 and len(inner) + len(outer) == 1:
        width //= VECTOR
    elif not along and outer[0].stride == 1:
        vector = _output_vector(int(tensor.storage_offset()), outer, inner)
        width //= vector
    threads = MOST_THREADS // vector
    across, down = min(_power_of_two(width), threads), min(_power_of_two(height), threads)
    block_x = min(across, WARP)
    block_y = min(down, threads // block_x)
    block_x = min(across, threads // block_y)
    step_in, step_out = (block_x, 1) if along else (1, block_x)
    if -(-inputs // step_in) < min(16 * block_y, MOST_A_THREAD):
        return []  # a warp for each result
    values = -(-inputs // (step_in * block_y))
    grid = -(-(outputs // vector) // step_out)
    target = card.sm_count * (card.properties().max_threads_per_multi_processor // (block_x * block_y))
    if values < MOST_A_THREAD or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // LEAST_A_THREAD)), -(-values // MOST_A_THREAD))
    if blocks < 2:
        return []
    size = _partial_bytes(op, tensor.dtype) * outputs * blocks
    return [size if along else size * block_x * vector, 4 * grid]


def _merged(dimensions: list[Dimension]) -> list[Dimension]:
    """The nearest in memory first; those that lie without a gap as one, and none of size 1."""
    found: list[Dimension] = []
    for each in sorted((d for d in dimensions if d.size != 1), key=lambda d: d.stride):
        if found and found[-1].size * found[-1].stride == each.stride:
            found[-1] = Dimension(found[-1].size * each.size, found[-1].stride)
        else:
            found.append(each)
    return found


def _output_vector(offset: int, outer: list[Dimension], inner: list[Dimension]) -> int:
    """get_output_vec_size: as many results as a thread may make at once, at most four."""
    vector = VECTOR
    for number in (offset, outer[0].size, *(d.stride for d in (*inner, *outer[1:]))):
        while number % vector:
            vector //= 2
    return vector


def _power_of_two(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _partial_bytes(op: str, dtype: torch.dtype) -> int:
    """Of one thread's part of a result. Half precision is summed in fp32."""
    if op in ("max", "min", "argmax", "argmin"):
        return PAIR_BYTES
    return dtype.itemsize if op in ("amax", "amin") else max(dtype.itemsize, 4)
