"""What makes a trace quicker and changes none of its bytes (tests/test_trace_quick.py compares them).

A traced step runs some ten thousand ops, and torch spends most of their time on questions that have one answer here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.tracer import Tracer

_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def _tensor_key(tensor: FakeTensor) -> tuple[Any, ...]:
    """All that torch's own key says of a tensor without symbols and with strides, in one tuple instead of 25 parts."""
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
        tensor.is_inference(), tensor.is_quantized,
    )  # fmt: skip


def _key_parts(patches: Patches) -> None:
    """The key under which the fake mode remembers what an op gives: half of the time that an op takes."""
    original = getattr(FakeTensorMode, "_prep_args_for_hash", None)
    if original is None:  # another torch; its own way stays
        return

    def parts(mode: FakeTensorMode, result: list[Any], args: Any, *rest: Any) -> None:
        if not isinstance(args, list | tuple):
            return original(mode, result, args, *rest)
        found: list[Any] = [type(args), len(args)]
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                simple = arg.fake_mode is mode and arg.constant is None and arg.layout is torch.strided
                if not simple or arg._has_symbolic_sizes_strides:
                    return original(mode, result, args, *rest)
                found.append(_tensor_key(arg))
            elif kind in _PLAIN:
                found += (kind, arg)
            elif kind is list or kind is tuple:
                parts(mode, found, arg, *rest)
            else:
                return original(mode, result, args, *rest)
        result += found
        return None

    patches.set(FakeTensorMode, "_prep_args_for_hash", parts)


def _unwrapped(patches: Patches) -> None:
    """Dispatches without what keeps Dynamo out of them, where no Dynamo runs."""
    for mode in (Tracer, FakeTensorMode):
        raw = getattr(mode.__torch_dispatch__, "__wrapped__", None)
        if raw is not None:
            patches.set(mode, "__torch_dispatch__", raw)


@contextlib.contextmanager
def quick(*, compiled: bool) -> Iterator[None]:
    """Within it ops on fake tensors take less time. `compiled`: Dynamo runs, too."""
    with Patches() as patches:
        _key_parts(patches)
        if not compiled:
            _unwrapped(patches)
        yield
