"""Memory that CUDA kernels take for themselves, by shape and card, each rule with its file of PyTorch. No torch."""

import math
from collections.abc import Iterable
from typing import NamedTuple

MOST_THREADS, WARP, VECTOR = 512, 32, 4
LEAST_A_THREAD, MOST_A_THREAD = 16, 256  # values


class Processors(NamedTuple):
    """A card's streaming multiprocessors: how many, and the threads that one carries."""

    number: int
    threads: int

    @classmethod
    def of(cls, capability: tuple[int, int], number: int) -> "Processors":
        """CUDA C++ programming guide, technical specifications per compute capability."""
        known = {(7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (9, 0): 2048, (10, 0): 2048}
        return cls(number, known.get(capability, 1536))


# -- flash attention (aten .../transformers/cuda/flash_attn/flash_api.cpp) ----------------------------------


def padded_head(D: int) -> int:
    """The width of a head in flash attention's own buffers."""
    return _up(D, 32 if D <= 128 else 64)


def flash_split_bytes(batch: int, heads: int, block: int, keys: int, D: int, processors: int) -> list[int]:
    """Return bytes of both sums where keys are split over blocks (mha_fwd, set_params_splitkv); [] where not."""
    parts = -(-keys // (256 if D <= 64 else 128 if D <= 128 else 64))
    splits = _splits(batch * heads * -(-block // 64), 2 * processors, parts)
    rows = 4 * splits * batch * heads * block
    return [] if splits < 2 else [rows, rows * padded_head(D)]


def _splits(blocks: int, processors: int, keys: int) -> int:
    """num_splits_heuristic: the fewest splits that keep the card nearly as busy as the best number of them."""
    if blocks >= 0.8 * processors:
        return 1
    busy = {}
    for splits in range(1, min(128, processors, keys) + 1):
        if splits == 1 or -(-keys // splits) != -(-keys // (splits - 1)):
            waves = blocks * splits / processors
            busy[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in busy.items() if share >= 0.85 * max(busy.values()))


def flash_backward_bytes(batch: int, heads: int, block: int, D: int) -> list[int]:
    """softmax_d and dq_accum, fp32, padded (mha_bwd)."""
    rows = 4 * batch * heads * _up(block, 128)
    return [rows, rows * padded_head(D)]


# -- memory-efficient attention (aten .../transformers/cuda/mem_eff_attention/kernel_backward.h) -----------


def efficient_backward_bytes(batch: int, heads: int, block: int, D: int, *, half: bool) -> list[int]:
    """Sums of gradient times output, and the blocks in which dq is summed. Of compute capability 8 and above."""
    rows, nbytes = _gradient_block(D, half=half)
    return [4 * batch * heads * block, batch * heads * -(-block // rows) * nbytes]


def _gradient_block(D: int, *, half: bool) -> tuple[int, int]:
    """(rows, bytes) of what a block of that kernel sums of dq, with its lock: 64 columns of 64 rows, as many as a head
    has; in half precision heads of 65 to 128 have blocks of another shape."""
    if half and 64 < D <= 96:
        return 128, 4 * 128 * 128 + 32
    if half and 96 < D <= 128:
        return 64, 4 * 64 * 384 + 32
    return 64, -(-D // 64) * (4 * 64 * 64 + 16)


# -- reductions (setReduceConfig of aten/src/ATen/native/cuda/Reduce.cuh) -----------------------------------


class Dimension(NamedTuple):
    """Of the tensor that is read: how many, and how far apart."""

    size: int
    stride: int


def reduction_bytes(
    processors: Processors, inner: Iterable[Dimension], outer: Iterable[Dimension], partial_bytes: int, offset: int = 0
) -> list[int]:
    """Return bytes of partial results and of counters; [] where one block does each result. `inner`: dimensions summed;
    `partial_bytes`: of one thread's part; `offset`: in its storage, in elements."""
    inner, outer = _merged(inner), _merged(outer)
    inputs, outputs = math.prod(d.size for d in inner), math.prod(d.size for d in outer)
    if inputs <= MOST_A_THREAD or not outputs:
        return []
    along = not outer or inner[0].stride < outer[0].stride  # neighbours in memory are summed together
    width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if along and inner[0].stride == 1 and inputs > 128 and len(inner) + len(outer) == 1:
        width //= VECTOR
    elif not along and outer[0].stride == 1:
        vector = _output_vector(offset, outer, inner)
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
    target = processors.number * (processors.threads // (block_x * block_y))
    if values < MOST_A_THREAD or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // LEAST_A_THREAD)), -(-values // MOST_A_THREAD))
    if blocks < 2:
        return []
    size = partial_bytes * outputs * blocks
    return [size if along else size * block_x * vector, 4 * grid]


def column_sum_bytes(processors: Processors, rows: int, columns: int) -> list[int]:
    """Of the sum of all rows, in fp32, as the gradient of a bias is one."""
    return reduction_bytes(processors, [Dimension(rows, columns)], [Dimension(columns, 1)], 4)


def _merged(dimensions: Iterable[Dimension]) -> list[Dimension]:
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


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
