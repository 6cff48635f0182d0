"""Losses that are one op to a trace and more to PyTorch, on every device.

aten/src/ATen/native/{BinaryOps,Loss}.cpp and cuda/Loss.cu: some make the loss of each element first, and some of these
keep its memory under the one number that they return.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Written as other ops, which the trace then sees.
COMPOSED = {aten.binary_cross_entropy_with_logits.default}
MEAN, SUM = 1, 2
# Which argument says how the elements are reduced.
ELEMENTWISE = {"mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2}
# What is returned is a number in the memory of all elements.
KEPT = {"mse_loss": 2, "smooth_l1_loss": 2, "binary_cross_entropy": 3}


def inside(op: str, args: tuple[Any, ...]) -> list[int]:
    """Bytes of the loss of each element, which go when the op is done."""
    return [_elements_bytes(args)] if _is_reduced(op, args, ELEMENTWISE) else []


def keep(op: str, args: tuple[Any, ...], out: Any) -> None:
    """Let the result have the memory that it has in PyTorch."""
    if isinstance(out, Tensor) and _is_reduced(op, args, KEPT):
        out.untyped_storage().resize_(_elements_bytes(args))


def run_composed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op by its own kernel, which calls others."""
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
