"""A model that cannot be compiled here trains uncompiled: slower, and the same to rounding.

Compilation comes with the first call of each size, and its backward half with the first backward pass, so it may fail
in the middle of a step or of an evaluation: for want of memory while kernels are tried, of shared memory on the card
(Triton's OutOfResources), of a compiler that works, of a place on the disk.
"""

import contextlib
import ctypes
from dataclasses import dataclass

from foretrain.model.step import TrainState

_FROM = ("torch._dynamo.", "torch._inductor.", "triton.")  # where the classes of such errors are


@dataclass(frozen=True)
class NotCompiled:
    """Why there are no compiled kernels."""

    reason: str


def not_compiled(error: BaseException) -> NotCompiled | None:
    """The reason, where an exception is the compiler's or that of a kernel it made; else None."""
    if not any(cls.__module__.startswith(_FROM) for cls in type(error).__mro__):
        return None
    inner = getattr(error, "inner_exception", None) or error
    said = next((line.strip() for line in str(inner).splitlines() if line.strip()), "")
    return NotCompiled(f"{type(inner).__name__}: {said}"[:200])


def go_eager(state: TrainState) -> None:
    """From here on a state runs uncompiled, and in the memory of a run that never was compiled."""
    state.model.stay_eager()
    state.call = state.model
    remove_frame_hook()


def remove_frame_hook() -> None:
    """Take Dynamo's hook out of the interpreter, where a compiler that failed leaves it.

    Dynamo counts who uses its hook, and an exception of the compiler passes by where it would count down again;
    neither torch._dynamo.reset nor set_eval_frame(None) helps. With a hook (PEP 523) Python inlines no calls: a caller
    keeps what it passes until the call returns, so that tensors which the callee deletes live on, and a step takes
    more memory than planned. Nothing is compiled from here on, so nobody misses it.
    """
    with contextlib.suppress(AttributeError):  # another Python, without this interface
        python = ctypes.pythonapi
        python.PyInterpreterState_Get.restype = ctypes.c_void_p
        change = python._PyInterpreterState_SetEvalFrameFunc
        change.argtypes, change.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        change(python.PyInterpreterState_Get(), ctypes.cast(python._PyEval_EvalFrameDefault, ctypes.c_void_p))
