"""A model that cannot be compiled here trains uncompiled: slower, and the same to rounding.

Compilation comes with the first call of each size, and its backward half with the first backward pass, so it may fail
in the middle of a step or of an evaluation: for want of memory while kernels are tried, of shared memory on the card
(Triton's OutOfResources), of a compiler that works, of a place on the disk.
"""

from dataclasses import dataclass

from foretrain.lm.step import TrainState

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
    """From here on a state runs uncompiled."""
    state.model.stay_eager()
    state.call = state.model
