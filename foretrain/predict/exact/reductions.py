"""What a reduction on the card takes for itself: partial sums of blocks that share one result.

Read from setReduceConfig of aten/src/ATen/native/cuda/Reduce.cuh: a reduction over many values is divided over threads,
then over warps, then over blocks; only the last of these needs memory, for each block's part and a counter.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.predict.exact.fake_card import Card

MOST_THREADS, WARP, VECTOR = 512, 32, 4
LEAST_A_THREAD, MOST_A_THREAD = 16, 256  # values


class Dimension(NamedTuple):
    """Of the tensor that is read: how many, and how far apart."""

    size: int
    stride: int


def reduction_buffers(card: Card, tensor: Tensor, dims: Any) -> list[int]:
    """Bytes of partial results and of counters; [] where one block does each result. `dims`: None for all."""
    wanted = [dims] if isinstance(dims, int) else list(dims or range(tensor.dim()))
    reduced = {d % tensor.dim() for d in wanted} if tensor.dim() else set[int]()
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
    size = _summed_in_bytes(tensor.dtype) * outputs * blocks
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


def _summed_in_bytes(dtype: torch.dtype) -> int:
    """Half precision is summed in fp32."""
    return max(dtype.itemsize, 4)
