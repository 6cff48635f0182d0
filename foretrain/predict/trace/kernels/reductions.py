"""Temporaries of sums, means, maxima and losses.

The input is first converted to the dtype of the sum (aten/src/ATen/native/ReduceOpsUtils.h, make_reduction). What
blocks that share a result take: predict/estimate/kernel_buffers.py. Some losses first make that of each element, and
some of these keep its memory under the number that they return (BinaryOps.cpp, Loss.cpp, Loss.cu). PyTorch has no fake
kernel for the loss of an alignment (LossCTC.cpp, LossCTC.cu), whose tensors are made here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.predict.estimate.kernel_buffers import Dimension, reduction_bytes
from foretrain.predict.trace.card.torch_cuda import Card

PAIR_BYTES = 16  # a value and its index
CONVERTED = {"sum", "mean", "prod", "nansum"}
REDUCTIONS = (*CONVERTED, "max", "min", "argmax", "argmin", "amax", "amin")
# Losses and the like that are one op to a trace, and several to PyTorch, which the trace then sees.
aten = torch.ops.aten
COMPOSED = {aten.binary_cross_entropy_with_logits.default, aten._euclidean_dist.default}
MEAN, SUM = 1, 2
# Which argument holds the reduction.
ELEMENTWISE = {"mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2}
# The returned number is in the memory of all elements.
KEPT = {"mse_loss": 2, "smooth_l1_loss": 2, "binary_cross_entropy": 3}


def as_large_as_the_input(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the bytes made of the input first, on any device: logsumexp's maxima and exponentials, or the input in the
    dtype of the sum. Integers and booleans are summed in int64.
    """
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
    """Return the reduced dimensions, all for None or an empty list; {} where there is nothing to reduce."""
    if not isinstance(x, Tensor) or x.numel() == 0 or x.dim() == 0:
        return set()
    asked = list(dims) if isinstance(dims, list | tuple) else [dims]
    if dims is None or not asked:
        return set(range(x.dim()))
    return {d % x.dim() for d in asked} if all(type(d) is int for d in asked) else set()


def reduction_buffers(card: Card, op: str, tensor: Any, dims: Any) -> list[int]:
    """Return bytes of partial results and of counters; [] where one block does each result. `dims`: None for all."""
    reduced = _reduced(tensor, dims)
    if not reduced:
        return []
    of = {d: Dimension(tensor.shape[d], tensor.stride(d)) for d in range(tensor.dim())}
    inner, outer = [of[d] for d in reduced], [of[d] for d in of if d not in reduced]
    return reduction_bytes(
        card.processors, inner, outer, _partial_bytes(op, tensor.dtype), int(tensor.storage_offset())
    )


def _partial_bytes(op: str, dtype: torch.dtype) -> int:
    """Half precision is summed in fp32."""
    if op in ("max", "min", "argmax", "argmin"):
        return PAIR_BYTES
    return dtype.itemsize if op in ("amax", "amin") else max(dtype.itemsize, 4)


def inside(op: str, args: tuple[Any, ...]) -> list[int]:
    return [_elements_bytes(args)] if _is_reduced(op, args, ELEMENTWISE) else []


def keep(op: str, args: tuple[Any, ...], out: Any) -> None:
    if isinstance(out, Tensor) and _is_reduced(op, args, KEPT):
        out.untyped_storage().resize_(_elements_bytes(args))
    elif op == "col2im":  # made as large as its input (aten/src/ATen/native/Col2Im.cpp and cuda/Im2Col.cu)
        out.untyped_storage().resize_(max(out.nbytes, args[0].numel() * args[0].element_size()))


def run_composed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    run: Callable[..., Any] = func._op_dk
    return run(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _is_reduced(op: str, args: tuple[Any, ...], where: dict[str, int]) -> bool:
    if op not in where:
        return False
    place = where[op]
    return (args[place] if len(args) > place else MEAN) in (MEAN, SUM)


def _elements_bytes(args: tuple[Any, ...]) -> int:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return shape.numel() * torch.result_type(args[0], args[1]).itemsize


def _aligned(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Make the losses, and the scores of each step with each place in a target and between two."""
    steps, rows, _ = log_probs.shape
    states = log_probs.new_empty((rows, steps, 2 * _longest(targets, lengths, rows) + 1))
    return log_probs.new_empty(rows), states


def _longest(targets: Tensor, lengths: Sequence[int] | Tensor, rows: int) -> int:
    """Return the length of the longest target, of tensors that of the padded ones, or of equal ones end to end."""
    if not isinstance(lengths, Tensor):
        return max(lengths)
    return targets.shape[1] if targets.dim() > 1 else -(-targets.shape[0] // rows)


def _aligned_backward(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    states = rest[4]
    backwards = torch.empty_like(states)  # noqa: F841  # it is held
    return torch.empty_like(log_probs)


def _by_cudnn(log_probs: Tensor, targets: Tensor, *rest: Any) -> bool:
    """Return whether cuDNN may compute it: its workspace is unknown, and its op cannot be traced."""
    return torch.backends.cudnn.enabled and targets.dtype == torch.int32


def with_tensors(ctc_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.ctc_loss with lengths as tensors, as lists of them become real tensors in it."""

    def run(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any) -> Tensor:
        if not isinstance(lengths, Tensor):
            targets = targets[:, : max(lengths)] if targets.dim() > 1 else targets
            inputs, lengths = (torch.tensor(each, device=log_probs.device) for each in (inputs, lengths))
        return ctc_loss(log_probs, targets, inputs, lengths, *rest)

    return run


CTC: dict[str, Callable[..., Any]] = {
    "_ctc_loss": _aligned,
    "_ctc_loss_backward": _aligned_backward,
    "_use_cudnn_ctc_loss": _by_cudnn,
    "_use_miopen_ctc_loss": lambda *args: False,
}
ALIGNMENTS: dict[Any, Callable[..., Any]] = {
    getattr(getattr(aten, name), overload): run
    for name, run in CTC.items()
    if hasattr(aten, name)
    for overload in ("default", "Tensor")
}
