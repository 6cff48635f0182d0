"""Memory that CUDA kernels allocate for themselves, which no tensor of the program shows.

Each rule names the file of PyTorch that it was read from; tests/cuda_build holds them against PyTorch's CUDA build,
allocation by allocation.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from foretrain.base.units import MIB
from foretrain.predict.allocator.lifetimes import GRAPH_POOL
from foretrain.predict.estimate.kernel_buffers import efficient_backward_bytes, flash_backward_bytes, flash_split_bytes
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import convolutions
from foretrain.predict.trace.kernels.reductions import REDUCTIONS, reduction_buffers
from foretrain.predict.trace.tracer import EIGHT_BIT_MATMULS, MATMULS, InKernel, Result, Step, Tracer, Workspace

Rule = Callable[[Card, tuple[Any, ...]], list[Step]]


def torch_version() -> tuple[int, int]:
    """(2, 13) for 2.13.0+cpu."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper, since 2.12 on Blackwell too; else 8.125 MiB."""
    large = capability[0] == 9 or (capability[0] >= 10 and torch_version() >= (2, 12))
    return 32 * MIB if large else 4096 * 1024 * 2 + 16 * 1024 * 8


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _flash(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """With dropout the random state is made a second time, and keys are never split."""
    B, H, T, D = args[0].shape
    if args[3:4] > (0,):  # dropout
        return [Result(0), Result(1), 16, Result(2), Result(3), -16]
    sums = flash_split_bytes(B, H, T, args[1].shape[2], D, card.sm_count)
    return [Result(0), Result(1), *sums, Result(2), Result(3)]


def _flash_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """aten .../transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.

    Fewer key heads get their gradients from those of all heads, dk_expanded and dv_expanded.
    """
    query, key = args[1], args[2]
    B, H, T, D = query.shape
    # The kernel wants the gradient and the output as (B, T, H, D); padded heads are not laid out so.
    copies = [t.nbytes for t in (args[0], args[4]) if not t.transpose(1, 2).is_contiguous()]
    expanded = [B * H * key.shape[2] * D * key.element_size()] * 2 if key.shape[1] != H else []
    return [*copies, Result(0), Result(1), Result(2), *flash_backward_bytes(B, H, T, D), *expanded]


# What cuDNN's attention wants beside its results, in bytes; of its backward also what the rule below adds. These are
# allocations of an H100, torch 2.11 with CUDA 13.0: heads of 48 and 64, 512 and 1024 tokens, with and without dropout
# and grouped heads (benchmarks/gpu/suite.py).
CUDNN_BYTES = 256


def _cudnn(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Seed and offset first (aten .../transformers/cuda/attention.cu); sums only for a backward pass."""
    sums = [Result(1)] if args[4] else []
    return [Result(2), Result(3), Result(0), *sums, CUDNN_BYTES]


def _cudnn_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """dq and the sums of gradient times output in fp32; dk and dv of all heads where keys have fewer."""
    query, key = args[1], args[2]
    B, H, T, D = query.shape
    expanded = 2 * B * H * key.shape[2] * D * key.element_size() if key.shape[1] != H else 0
    return [Result(0), Result(1), Result(2), 4 * B * H * T * (D + 1) + expanded + CUDNN_BYTES]


def _efficient(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Seed and offset of the random numbers stay on the host (aten .../transformers/cuda/attention.cu)."""
    return [Result(0), Result(1)]


def _efficient_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """The sums of gradient times output, which a half-precision kernel makes itself, and the blocks in which dq is
    summed (aten .../transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h)."""
    gradient, query = args[0], args[1]
    B, H, T, D = query.shape
    sums, blocks = efficient_backward_bytes(B, H, T, D, half=gradient.dtype != torch.float32)
    product, delta = sums * D, [sums]
    if gradient.dtype == torch.float32:
        # (B, T, H) sums are laid out anew as (B, H, T), where that is another order
        delta = [product, sums, -product] if H == 1 else [product, sums, sums, -sums, -product]
    return [Result(0), Result(1), Result(2), *delta, blocks]


def _sort_bytes(n: int, largest: int) -> int:
    """cub's radix sort of n pairs of int64, for keys up to `largest`: both lists again, histograms, a tile's state."""
    passes = -(-largest.bit_length() // 8)
    copies = 0 if passes == 1 else 2 * _up(8 * n, 256)
    return 255 + 256 + passes * 256 * 8 + copies + -(-n // SORT_TILE) * 256 * 4


def _scan_bytes(n: int, tile: int) -> int:
    """The state of each tile of one of cub's scans over n items: 16 bytes, 32 of them to spare."""
    return 255 + 256 + _up(16 * (-(-n // tile) + 32), 256)


# Items that a block of cub's takes at once, of int64, on cards of compute capability 8 and above.
SORT_TILE, UNIQUE_TILE, SUM_TILE, SELECT_TILE, REDUCE_TILE = 3840, 320, 896, 640, 4096


def _embedding_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Above 3072 tokens the rows are sorted and summed in segments (aten/src/ATen/native/cuda/Embedding.cu and
    EmbeddingBackwardKernel.cu)."""
    grad, indices, vocabulary = args[0], args[1], args[2]
    n, C = indices.numel(), grad.shape[-1]
    if n <= 3072:
        return []
    counted = len(args) > 4 and args[4]  # how often each row occurs, by which its gradient is divided
    count = _scan_bytes(n, SUM_TILE)
    segments = min(n, vocabulary)
    partial = n // 10 + segments
    sort, unique, sums = _sort_bytes(n, vocabulary), _scan_bytes(n, UNIQUE_TILE), _scan_bytes(segments, SUM_TILE)
    # In a vocabulary of up to 128 no row is summed in parts (seen in 2.13).
    rows = 4 * partial * C if vocabulary > 128 else 8 * partial
    return [
        8 * n, 8 * n, 8 * n, sort, -sort, -8 * n,  # rows by token
        *([8 * n, count, -count, count, -count] if counted else []),
        Result(0),
        8 * n, 8, 8 * n, unique, -unique, -8 * n,  # where each token's rows begin
        8 * segments, 8 * segments, sums, -sums,  # how many partial sums each has
        8, 8 * partial, rows,
    ]  # fmt: skip


def _norm_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Partial sums of the weight's gradient above 65,536 rows (aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""
    x, normed, weight, bias = args[1], args[2], args[5], args[6]
    N = 1
    for size in normed:
        N *= size
    M = x.numel() // N
    if M <= 64 * 1024 or card.sm_count // 2 <= N // 32 or weight is None:
        return []
    blocks = min(32768 // max(1, -(-N // 32)), -(-M // 32))
    return [blocks * N * weight.element_size()] * (2 if bias is not None else 1)


def _safe_softmax(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Which scores, then which rows, are minus infinity: booleans (aten .../transformers/attention.cpp, 2.13)."""
    scores = args[0]
    return [scores.numel(), scores.numel() // scores.shape[-1], 4]


def _reduction(op: str) -> Rule:
    """Of sums, means, maxima …: (tensor, dimensions, …)."""

    def rule(card: Card, args: tuple[Any, ...]) -> list[Step]:
        return list(reduction_buffers(card, op, args[0], args[1] if len(args) > 1 else None))

    return rule


def _softmax_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """The gradient times the output (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    gradient, output = args[0], args[1]
    return [gradient.numel() * torch.promote_types(gradient.dtype, output.dtype).itemsize]


def _norm(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """linalg.vector_norm: (tensor, order, dimensions, …)."""
    return list(reduction_buffers(card, "norm", args[0], args[2] if len(args) > 2 else None))


def _foreach_norm(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """One partial sum a chunk of 65,536 elements, as many for each tensor as the largest needs (ForeachReduceOp.cu)."""
    tensors = args[0]
    partial = len(tensors) * max(-(-t.numel() // 65536) for t in tensors) * 4
    return [partial, *map(Result, range(len(tensors)))]


def _dropout(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """The mask comes before the result (aten/src/ATen/native/cuda/Dropout.cu)."""
    return [Result(1), Result(0)]


def _roll(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Of a contiguous copy. Of several dimensions the first one is rolled, then the others of what that gave, which
    stays until all are done (aten/src/ATen/native/cuda/TensorTransformations.cu, TensorTransformations.h)."""
    size = args[0].numel() * args[0].element_size()
    copy = [] if args[0].is_contiguous() else [size]
    between = [size] * (len(args[2]) - 1 if len(args) > 2 else 0)
    if not between:
        return [*copy, Result(0), *(-each for each in copy)]
    return [*copy, between[0], *(-each for each in copy), *between[1:], Result(0), *(-each for each in between)]


def _gru_step(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """What is kept comes before the new state (aten/src/ATen/native/cuda/RNN.cu)."""
    return [Result(1), Result(0)]


def _lstm_step(card: Card, args: tuple[Any, ...]) -> list[Step]:
    return [Result(2), Result(0), Result(1)]


def _nonzero(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """How many there are is counted by all blocks, then each tile of 640 elements says where its own begin
    (aten/src/ATen/native/cuda/Nonzero.cu, cub's DeviceReduce and DeviceSelect)."""
    n = args[0].numel()
    if n == 0:
        return []
    blocks = 5 * card.sm_count * (card.processors.threads // 256)
    count = 1 if n <= REDUCE_TILE else 255 + _up(4 * blocks, 256)
    select = 255 + 256 + _up(8 * (-(-n // SELECT_TILE) + 32), 256)
    copy = [] if args[0].is_contiguous() else [args[0].numel() * args[0].element_size()]
    return [*copy, 4, count, -count, Result(0), select, -select]


def _index_put(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Where values add up, rows are sorted by where they go (aten/src/ATen/native/cuda/Indexing.cu).

    Of each index: whether it is in range, unless the op is the backward pass of one that was; then rows from the end
    are counted from the start, and it is multiplied by its stride.
    """
    adds = any(args[3:4]) or torch.are_deterministic_algorithms_enabled()
    indices = [(d, index) for d, index in enumerate(args[1]) if index is not None]
    n = math.prod(torch.broadcast_shapes(*(index.shape for _, index in indices)))
    if not adds or n == 0:
        return []
    steps: list[Step] = []
    for number, (_, index) in enumerate(indices):
        own = 8 * index.numel()
        steps += [] if any(args[4:5]) else IN_RANGE
        steps += [own, own, -own, *([-own] if number else [])]
    largest = math.prod(args[0].shape[d] for d, _ in indices)
    sort = 1 if n <= SORT_TILE else _sort_bytes(n, largest)
    return [*steps, 8 * n, 8 * n, 8 * n, sort, -sort]


# The smallest and the largest of an index, each compared with its dimension.
IN_RANGE: list[Step] = [8, 8, 1, -1, 1, -1, -8, -8]


def _index_put_anew(card: Card, args: tuple[Any, ...]) -> list[Step]:
    steps = _index_put(card, args)
    return [Result(0), *steps] if steps else []


def _sort(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Rows of up to 4,096 in one block each; longer ones by cub with their positions, up to 127 of them all at once and
    then by row, more of them row by row (aten/src/ATen/native/cuda/Sort.cpp, Sort.cu)."""
    x, *rest = args
    dim = rest[0] if rest and type(rest[0]) is int else -1
    if x.dim() == 0 or x.numel() == 0:
        return []
    N, n, width = x.numel(), x.shape[dim], x.element_size()
    results: list[Step] = [Result(0), Result(1)]
    if n <= 4096:
        return [*results, 8 * n]
    rows = N // n
    if rows == 1:
        sort = _sort_pairs_bytes(card, N, width)
        return [*results, 8 * N, sort, -sort]
    if rows < 128:
        sort, by_row = _sort_pairs_bytes(card, N, width), _sort_bytes(N, rows)
        return [*results, 8 * N, 8 * N, width * N, sort, -sort, -width * N, by_row, -by_row]
    sort = 255 + _up(width * N, 256) + _up(8 * N, 256)
    return [*results, 8 * N, sort, -sort]


def _sort_pairs_bytes(card: Card, n: int, width: int) -> int:
    """cub's radix sort of n keys of so many bytes with an int64 each, by all of their bits."""
    copies = _up(width * n, 256) + _up(8 * n, 256)
    if width >= 4:
        tile = 3072 if width == 4 else SORT_TILE
        return 255 + 256 + width * 256 * 8 + copies + -(-n // tile) * 256 * 4
    blocks = 5 * card.sm_count * (card.processors.threads // 256)  # each with how often it saw which digit
    return 255 + copies + blocks * width * 128 * 4 + 44 * 1024


def _multinomial(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """One of each row is drawn as the largest quotient of its weight and a random number
    (aten/src/ATen/native/Distributions.cpp); its checks take some bytes."""
    x, count, *again = args
    many = count > 1 or any(again[:1])
    return [] if many else [Result(0), x.numel() * x.element_size()]


RULES: dict[str, Rule] = {
    **{op: _reduction(op) for op in REDUCTIONS},
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _index_put),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put_anew),
    "sort": _sort,
    "multinomial": _multinomial,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "native_dropout": _dropout,
    "nonzero": _nonzero,
    "_thnn_fused_gru_cell": _gru_step,
    "_thnn_fused_lstm_cell": _lstm_step,
    "linalg_vector_norm": _norm,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _norm_backward,
    "_foreach_norm": _foreach_norm,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "roll": _roll,
}


def in_kernels(card: Card) -> InKernel:
    """The rules for a card, with cuBLAS's workspaces.

    Until torch 2.14 one stays for each thread that multiplies, the main one and autograd's, and for each stream that it
    does so on; from 2.15 on it lives for the one product (TORCH_CUBLAS_WORKSPACE_CACHE is off by default there).
    """
    workspace = cublas_workspace_bytes(card.capability)
    cached = torch_version() < (2, 15)

    def by_cublas(tracer: Tracer) -> list[Step]:
        if not cached:
            return [workspace]
        backward = torch._C._current_autograd_node() is not None
        stream = tracer.record.stream_now() % GRAPH_POOL
        name = "cuBLAS, autograd's thread" if backward else "cuBLAS, main thread"
        name += f", stream {stream}" if stream else ""
        return [] if name in tracer.workspaces else [Workspace(workspace, name)]

    def inside(tracer: Tracer, op: str, args: tuple[Any, ...], out: Any) -> list[Step]:
        if op in MATMULS or op in EIGHT_BIT_MATMULS:
            taken = by_cublas(tracer)
            return [Result(0), *taken] if taken else []
        if op in convolutions.OPS:
            asked = convolutions.asked(op, args, out)
            steps = convolutions.steps(card, op, args, out, upper=tracer.upper)
            if asked.in_cudnn:
                tracer.ranges.add(convolutions.NOTE)
                return steps
            # Its products come after the columns that they read.
            return [*steps[:2], *by_cublas(tracer), *steps[2:]] if asked.columns_bytes() else steps
        rule = RULES.get(op)
        return rule(card, args) if rule is not None else []

    return inside
