"""What a sum, a mean or a maximum takes for itself.

Two rules of PyTorch. aten/src/ATen/native/ReduceOpsUtils.h (make_reduction): the input is first converted to the dtype
of the sum. What blocks that share a result take: predict/estimate/kernel_buffers.py.
"""

import math
from typing import Any

import torch
from torch import Tensor

from foretrain.predict.estimate.kernel_buffers import Dimension, reduction_bytes
from foretrain.predict.trace.card.torch_cuda import Card

PAIR_BYTES = 16  # a value and its index
CONVERTED = {"sum", "mean", "prod", "nansum"}
REDUCTIONS = (*CONVERTED, "max", "min", "argmax", "argmin", "amax", "amin")


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
    of = {d: Dimension(tensor.shape[d], tensor.stride(d)) for d in range(tensor.dim())}
    inner, outer = [of[d] for d in reduced], [of[d] for d in of if d not in reduced]
    return reduction_bytes(
        card.processors, inner, outer, _partial_bytes(op, tensor.dtype), int(tensor.storage_offset())
    )


def _partial_bytes(op: str, dtype: torch.dtype) -> int:
    """Of one thread's part of a result. Half precision is summed in fp32."""
    if op in ("max", "min", "argmax", "argmin"):
        return PAIR_BYTES
    return dtype.itemsize if op in ("amax", "amin") else max(dtype.itemsize, 4)
