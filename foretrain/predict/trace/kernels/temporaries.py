"""Memory that CUDA kernels allocate for themselves, each rule with the file of PyTorch that it was read from;
tests/cuda_build checks them against PyTorch's CUDA build, allocation by allocation."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretrain.predict.allocator.blocks import GRAPH_POOL
from foretrain.predict.estimate.kernel_buffers import efficient_backward_bytes, flash_backward_bytes, flash_split_bytes
from foretrain.predict.software import Software
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import workspaces
from foretrain.predict.trace.kernels.reductions import REDUCTIONS, reduction_buffers
from foretrain.predict.trace.kernels.work import MATMULS
from foretrain.predict.trace.tracer import EIGHT_BIT_MATMULS, InKernel, Result, Step, Tracer, Workspace, is_dense

Rule = Callable[[Card, tuple[Any, ...]], list[Step]]


def torch_version() -> Software:
    major, minor = torch.__version__.split(".")[:2]
    return Software(int(major), int(minor))


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _copied(t: Tensor) -> list[Step]:
    """Return the bytes of a copy for a kernel that reads in order: gradients of sums are one number for all."""
    return [] if t.is_contiguous() else [t.numel() * t.element_size()]


def _copies_gradient(card: Card, args: tuple[Any, ...]) -> list[Step]:
    return [Result(0), *_copied(args[0])]


def _flash(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """With dropout the random state is made a second time, and keys are never split."""
    B, H, T, D = args[0].shape
    if args[3:4] > (0,):  # dropout
        return [Result(0), Result(1), 16, Result(2), Result(3), -16]
    sums = flash_split_bytes(B, H, T, args[1].shape[2], D, card.sm_count)
    return [Result(0), Result(1), *sums, Result(2), Result(3)]


def _flash_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """mha_bwd (aten .../flash_attn/flash_api.cpp): fewer key heads get gradients from those of all heads."""
    query, key = args[1], args[2]
    B, H, T, D = query.shape
    # The kernel wants the gradient and the output as (B, T, H, D); padded heads are not laid out so.
    copies = [nbytes for t in (args[0], args[4]) for nbytes in _copied(t.transpose(1, 2))]
    expanded = [B * H * key.shape[2] * D * key.element_size()] * 2 if key.shape[1] != H else []
    return [*copies, Result(0), Result(1), Result(2), *flash_backward_bytes(B, H, T, D), *expanded]


# Temporaries of cuDNN's attention, in bytes; of its backward also what the rule below adds. Seen on an H100, torch 2.11
# with CUDA 13.0: heads of 48 and 64, 512 and 1024 tokens, with and without dropout and grouped heads
# (benchmarks/gpu/suite.py).
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
    summed (aten .../transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h).
    """
    gradient, query = args[0], args[1]
    B, H, T, D = query.shape
    sums, blocks = efficient_backward_bytes(B, H, T, D, half=gradient.dtype != torch.float32)
    product, delta = sums * D, [sums]
    if gradient.dtype == torch.float32:
        # (B, T, H) sums are transposed to (B, H, T), where that is another order
        delta = [product, sums, -product] if H == 1 else [product, sums, sums, -sums, -product]
    return [*_copied(gradient.transpose(1, 2)), Result(0), Result(1), Result(2), *delta, blocks]


def _sort_bytes(n: int, largest: int, width: int = 8) -> int:
    """Return bytes of cub's radix sort of n pairs of int64 (or int32), for keys up to `largest`: both lists,
    histograms, a tile's state."""
    passes = -(-largest.bit_length() // 8)
    copies = 0 if passes == 1 else 2 * _up(width * n, 256)
    return 255 + 256 + passes * 256 * 8 + copies + -(-n * width // (8 * SORT_TILE)) * 256 * 4


def _scan_bytes(n: int, tile: int, state: int = 16) -> int:
    """Return bytes of the state of each tile of one of cub's scans over n items, 32 of them to spare."""
    return 255 + 256 + _up(state * (-(-n // tile) + 32), 256)


# Items that a block of cub's takes at once, of int64, on cards of compute capability 8 and above.
SORT_TILE, UNIQUE_TILE, SUM_TILE, SELECT_TILE, REDUCE_TILE = 3840, 320, 896, 640, 4096


def _embedding_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Above 3072 tokens the rows are sorted and summed in segments (aten/src/ATen/native/cuda/Embedding.cu)."""
    grad, indices, vocabulary = args[0], args[1], args[2]
    n = indices.numel()
    if n <= 3072:
        return [*_copied(grad), Result(0)]
    sort, parts = _sort_bytes(n, vocabulary), vocabulary > 128
    rows: list[Step] = [8 * n, 8 * n, 8 * n, sort, -sort, -8 * n]
    return [*_copied(grad), *rows, *_summed_by_row(grad, n, 8, vocabulary, counted=any(args[4:5]), parts=parts)]


def _bag_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Sort rows of sums and means and sum them in segments, however few (aten/src/ATen/native/cuda/EmbeddingBag.cu)."""
    grad, indices, vocabulary, counted, mode, sparse = args[0], args[1], args[6], args[7], args[8], args[9]
    n, wide = indices.numel(), indices.element_size()
    if sparse or mode == MAXIMUM or n == 0:
        return [] if sparse else [*_copied(grad), Result(0)]
    sort = 1 if n <= SORT_TILE else _sort_bytes(n, vocabulary, wide)
    rows: list[Step] = [wide * n, wide * n, wide * n, sort, -sort, -wide * n]
    return [*_copied(grad), *rows, *_summed_by_row(grad, n, wide, vocabulary, counted=counted, parts=True)]


MAXIMUM = 2  # of embedding_bag's modes


def _summed_by_row(grad: Tensor, n: int, wide: int, vocabulary: int, *, counted: bool, parts: bool) -> list[Step]:
    """Sum the gradients of n tokens, sorted by row, in segments (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu).
    `wide`: bytes of an index. `counted`: how often each row occurs, by which its gradient is divided. `parts`: rows are
    summed in parts, in fp32 (in a vocabulary of up to 128 an embedding's are not; seen in 2.13)."""
    segments = min(n, vocabulary)
    partial = n // 10 + segments
    count, unique = _scan_bytes(n, SUM_TILE), _scan_bytes(n * wide, 8 * UNIQUE_TILE)
    sums = _scan_bytes(segments * wide, 8 * SUM_TILE, state=2 * wide)
    return [
        *([wide * n, count, -count, count, -count] if counted else []),
        Result(0),
        wide * n, 8, wide * n, unique, -unique, -wide * n,  # where each token's rows begin
        wide * segments, wide * segments, sums, -sums,  # how many partial sums each has
        8, wide * partial, 4 * partial * grad.shape[-1] if parts else wide * partial,
    ]  # fmt: skip


def _bag(card: Card, args: tuple[Any, ...]) -> list[Step]:
    return [Result(2), Result(1), Result(0), Result(3)]


def _norm_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Partial sums of the weight's gradient above 65,536 rows (aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""
    x, normed, weight, bias = args[1], args[2], args[5], args[6]
    N = 1
    for size in normed:
        N *= size
    M = x.numel() // N
    copy: list[Step] = [*map(Result, range(sum(args[7]))), *_copied(args[0])]
    if M <= 64 * 1024 or card.sm_count // 2 <= N // 32 or weight is None:
        return copy
    blocks = min(32768 // max(1, -(-N // 32)), -(-M // 32))
    return [*copy, *[blocks * N * weight.element_size()] * (2 if bias is not None else 1)]


def _rms_norm_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    return [*map(Result, range(sum(args[5]))), *_copied(args[0])]


def _group_norm(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Scale and shift of each channel (aten/src/ATen/native/cuda/group_norm_kernel.cu)."""
    x, _, _, N, C, rest, groups = args[:7]
    sums: list[Step] = [4 * N * groups] * 2 if x.element_size() < 4 else []
    return [Result(0), Result(1), Result(2), *sums, *([4 * N * C] * 2 if rest > 1 else [])]


def _group_norm_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    N, C, rest, groups, mask = args[5:10]
    inside: list[Step] = [4 * N * groups, 4 * N * groups, *([4 * N * C] if rest > 1 else [])] if mask[0] else []
    return [*map(Result, range(sum(mask))), 4 * N * C, 4 * N * C, *inside]


def _im2col(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """The result is as large as the input at first (aten/src/ATen/native/cuda/Im2Col.cu)."""
    small = args[0].numel() * args[0].element_size()
    return [small, *_copied(args[0]), Result(0), -small]


def _unfold_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """With the positions along the dimension (aten/src/ATen/native/UnfoldBackward.h)."""
    _, sizes, dim = args[:3]
    return [Result(0), 8 * sizes[dim]]


def _safe_softmax(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Which scores, then which rows, are minus infinity: booleans (aten .../transformers/attention.cpp, 2.13)."""
    scores = args[0]
    return [scores.numel(), scores.numel() // scores.shape[-1], 4]


def _reduction(op: str) -> Rule:
    def rule(card: Card, args: tuple[Any, ...]) -> list[Step]:
        return list(reduction_buffers(card, op, args[0], args[1] if len(args) > 1 else None))

    return rule


def _softmax_backward(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """The gradient times the output (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    gradient, output = args[0], args[1]
    return [gradient.numel() * torch.promote_types(gradient.dtype, output.dtype).itemsize]


def _norm(card: Card, args: tuple[Any, ...]) -> list[Step]:
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
    """Roll a contiguous copy. Of several dimensions the first one is rolled, then the others of its result, which lives
    until all are done (aten/src/ATen/native/cuda/TensorTransformations.cu, TensorTransformations.h).
    """
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
    """Count by blocks, then tiles of 640 (aten/src/ATen/native/cuda/Nonzero.cu, DeviceReduce, DeviceSelect)."""
    n = args[0].numel()
    if n == 0:
        return []
    blocks = 5 * card.sm_count * (card.processors.threads // 256)
    count = 1 if n <= REDUCE_TILE else 255 + _up(4 * blocks, 256)
    select = 255 + 256 + _up(8 * (-(-n // SELECT_TILE) + 32), 256)
    copy = [] if args[0].is_contiguous() else [args[0].numel() * args[0].element_size()]
    return [*copy, 4, count, -count, Result(0), select, -select]


def _index_put(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Sort rows by destination where values add up (aten/src/ATen/native/cuda/Indexing.cu). Of each index: its range
    check, unless the op is the backward pass of a checked one; then negative rows are wrapped, and it is multiplied by
    its stride."""
    adds = any(args[3:4]) or torch.are_deterministic_algorithms_enabled()
    indices = [(d, index) for d, index in enumerate(args[1]) if index is not None]
    n = math.prod(torch.broadcast_shapes(*(index.shape for _, index in indices)))
    if not adds or n == 0:
        return []
    steps: list[Step] = []
    written = args[0].numel() // math.prod(args[0].shape[d] for d, _ in indices) * n
    ordered = args[2].is_contiguous() and args[2].numel() == written
    for number, (_, index) in enumerate(indices):
        own = 8 * index.numel()
        steps += [] if any(args[4:5]) else IN_RANGE
        steps += [own, own, -own, *([-own] if number else [])]
    largest = math.prod(args[0].shape[d] for d, _ in indices)
    sort = 1 if n <= SORT_TILE else _sort_bytes(n, largest)
    value = [] if ordered else [written * args[2].element_size()]
    return [*steps, *value, 8 * n, 8 * n, 8 * n, sort, -sort]


# The smallest and the largest of an index, each compared with its dimension.
IN_RANGE: list[Step] = [8, 8, 1, -1, 1, -1, -8, -8]


def _index_put_copy(card: Card, args: tuple[Any, ...]) -> list[Step]:
    steps = _index_put(card, args)
    return [Result(0), *steps] if steps else []


def _sort(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Sort rows of up to 4,096 in one block each; longer ones by cub with their positions, up to 127 of them together
    and then by row, more of them row by row (aten/src/ATen/native/cuda/Sort.cpp, Sort.cu).
    """
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
    """Return bytes of cub's radix sort of n keys of this width with an int64 each, by all of their bits."""
    copies = _up(width * n, 256) + _up(8 * n, 256)
    if width >= 4:
        tile = 3072 if width == 4 else SORT_TILE
        return 255 + 256 + width * 256 * 8 + copies + -(-n // tile) * 256 * 4
    blocks = 5 * card.sm_count * (card.processors.threads // 256)  # each with its histogram of digits
    return 255 + copies + blocks * width * 128 * 4 + 44 * 1024


def _multinomial(card: Card, args: tuple[Any, ...]) -> list[Step]:
    """Draw one of each row as the largest quotient of its weight and a random number
    (aten/src/ATen/native/Distributions.cpp); its checks take some bytes.
    """
    x, count, *again = args
    many = count > 1 or any(again[:1])
    return [] if many else [Result(0), x.numel() * x.element_size()]


# Backward passes that read the gradient in order (aten/src/ATen/native/cuda/*Pool*.cu, *Padding*.cu, UpSample*.cu,
# SoftMax.cu): each makes its result first.
COPYING = (
    *(f"{kind}_pool{d}d{which}_backward" for kind, which in (("max", "_with_indices"), ("avg", "")) for d in (2, 3)),
    *(f"{kind}_pool{d}d_backward" for kind in ("adaptive_max", "_adaptive_avg") for d in (2, 3)),
    *(f"reflection_pad{d}d_backward" for d in (1, 2)),
    *(
        f"{how}_nearest{exact}{d}d_backward"
        for how, exact in (("upsample", ""), ("_upsample", "_exact"))
        for d in (1, 2, 3)
    ),
    *(f"upsample_{how}_backward" for how in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"_upsample_{how}2d_aa_backward" for how in ("bilinear", "bicubic")),
    "_log_softmax_backward_data",
)

RULES: dict[str, Rule] = {
    **{op: _reduction(op) for op in REDUCTIONS},
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _index_put),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put_copy),
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
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _bag),
    "_embedding_bag_backward": _bag_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "unfold_backward": _unfold_backward,
    "im2col": _im2col,
    "col2im": _copies_gradient,
    **dict.fromkeys(COPYING, _copies_gradient),
    "native_layer_norm_backward": _norm_backward,
    "_foreach_norm": _foreach_norm,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "roll": _roll,
}


def _laid_out(op: str, args: tuple[Any, ...]) -> list[Step]:
    """Copy matrices that cuBLAS cannot read in place (aten/src/ATen/native/cuda/cuBlasCommonArgs.h)."""
    factors = [t for t in args if isinstance(t, Tensor)][-2:] if op in MATMULS else []
    return [t.numel() * t.element_size() for t in reversed(factors) if not _is_readable(t)]


def _is_readable(t: Tensor) -> bool:
    rows, columns = t.shape[-2:]
    down, across = t.stride()[-2:]
    in_order = (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns))
    return in_order or (t.dim() == 2 and is_dense(t))


def in_kernels(card: Card) -> InKernel:
    """Return the rules for a card, with cuBLAS's workspaces. Until torch 2.14 one lives on for each thread and stream
    with matmuls, the main thread and autograd's; from 2.15 on it lives for the one matmul (TORCH_CUBLAS_WORKSPACE_CACHE
    is off by default there)."""
    workspace = torch_version().cublas_workspace_bytes(card.capability)
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
            taken = [*_laid_out(op, args), *by_cublas(tracer)]
            return [Result(0), *taken] if taken else []
        if op in workspaces.OPS:
            asked = workspaces.convolution_of(op, args, out)
            product = lambda: by_cublas(tracer)  # noqa: E731
            steps = workspaces.steps(card, op, args, out, upper=tracer.upper, product=product)
            if asked.in_cudnn:
                tracer.ranges.add(workspaces.NOTE)
            return steps
        rule = RULES.get(op)
        return rule(card, args) if rule is not None else []

    return inside
