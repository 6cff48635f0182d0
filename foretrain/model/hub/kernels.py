"""Kernels of others, such as Triton's: what they read and write. The estimate's `launch` records them for the time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def launch(kind: str, written: Tensor | Sequence[Tensor], *read: Tensor, shape: Sequence[int] = ()) -> None:
    """Do nothing: such a kernel allocates nothing, and tensors without values have nothing to change. kind: as in
    predict/speed/ops.py, with `triton_` before it: no compiler fuses it. shape: (m, n, k) of a matmul."""


def processors(device: Any) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def card_bytes(device: Any) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def sums_half_in_fp32(device: Any) -> bool:
    """Return whether the device adds matmuls of half-precision matrices to an fp32 one (torch.addmm's out_dtype)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def room_for_logits(like: Tensor, shape: Sequence[int], dtype: Any) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def column_sums(x: Tensor) -> Tensor:
    return x.sum(dim=0, dtype=torch.float32)


def offloaded(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), recomputed in backward. In the estimate its first argument is then on the host."""
    return checkpoint(function, *args, use_reentrant=True)
