"""Memory that CUDA kernels allocate for themselves, which no tensor of the program shows.

Each rule names the file of PyTorch that it was read from. Not modelled: cub and reduction buffers (well under a
MiB), split-KV attention (only for a handful of rows), the memory-efficient kernel's workspace.
"""

from collections.abc import Callable
from typing import Any

import torch

from foretrain.predict.exact.fake_card import Card
from foretrain.predict.exact.tracer import EIGHT_BIT_MATMULS, MATMULS, InKernel, Tracer
from foretrain.units import MIB

Rule = Callable[[Card, tuple[Any, ...]], list[int]]


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


def _flash_backward(card: Card, args: tuple[Any, ...]) -> list[int]:
    """softmax_d and dq_accum, fp32, padded (aten .../transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    B, H, T, D = args[1].shape
    rows, columns = _up(T, 128), _up(D, 32 if D <= 128 else 64)
    return [4 * B * H * rows, 4 * B * H * rows * columns]


def _embedding_backward(card: Card, args: tuple[Any, ...]) -> list[int]:
    """Above 3072 tokens the rows are sorted and summed in segments (aten/src/ATen/native/cuda/Embedding.cu)."""
    grad, indices, vocabulary = args[0], args[1], args[2]
    n, C = indices.numel(), grad.shape[-1]
    if n <= 3072:
        return []
    segments = min(n, vocabulary)
    partial = n // 10 + segments
    return [8 * n, 8 * n, 8 * n, 8 * segments, 8 * segments, 8 * partial, 4 * partial * C]


def _norm_backward(card: Card, args: tuple[Any, ...]) -> list[int]:
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


def _safe_softmax(card: Card, args: tuple[Any, ...]) -> list[int]:
    """Which scores, then which rows, are minus infinity: booleans (aten .../transformers/attention.cpp, 2.13)."""
    scores = args[0]
    return [scores.numel(), scores.numel() // scores.shape[-1]]


def _foreach_norm(card: Card, args: tuple[Any, ...]) -> list[int]:
    """One partial sum a chunk of 65,536 elements, as many for each tensor as the largest needs (ForeachReduceOp.cu)."""
    tensors = args[0]
    return [len(tensors) * max(-(-t.numel() // 65536) for t in tensors) * 4]


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _norm_backward,
    "_foreach_norm": _foreach_norm,
    "_safe_softmax": _safe_softmax,
}


def in_kernels(card: Card) -> InKernel:
    """The rules for a card, with cuBLAS's workspaces.

    Until torch 2.14 one stays for each thread that multiplies, the main one and autograd's; from 2.15 on it lives for
    the one product (TORCH_CUBLAS_WORKSPACE_CACHE is off by default there).
    """
    workspace = cublas_workspace_bytes(card.capability)
    cached = torch_version() < (2, 15)
    threads: set[bool] = set()

    def inside(tracer: Tracer, op: str, args: tuple[Any, ...]) -> list[int]:
        if op in MATMULS or op in EIGHT_BIT_MATMULS:
            if not cached:
                return [workspace]
            backward = torch._C._current_autograd_node() is not None
            if backward not in threads:
                threads.add(backward)
                id = tracer.record.alloc(workspace, "cublas", "", (), "uint8")
                tracer.record.tag(id, "workspace", "cuBLAS, autograd's thread" if backward else "cuBLAS, main thread")
            return []
        rule = RULES.get(op)
        return rule(card, args) if rule is not None else []

    return inside
