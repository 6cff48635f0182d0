"""Attempted steps and evaluations: what memory or the compiler refuses is undone and repeated another way. Until the
last backward pass only gradients and dropout's generator have changed, so the step can be repeated; from the optimizer
on a failure ends the run. An exception's frames hold every activation, so nothing is done inside `except`. Each size is
compiled at its first call, so that may fail late: the model then trains uncompiled."""

import contextlib
import ctypes
import errno
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch
from foretrain.hardware import accelerator
from foretrain.model.step import StepResult, TrainState
from foretrain.training.device import give_back

# Messages of PyTorch, CUDA's libraries and the system; torch.OutOfMemoryError is known by its type.
_MESSAGES = (
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation", "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory", "MPS backend out of memory", "Triton Error [CUDA]: out of memory",
    "Cuda failure 'out of memory'", "Cuda failure 2 'out of memory'",  # NCCL's
)  # fmt: skip
_FROM = ("torch._dynamo.", "torch._inductor.", "triton.")  # modules of such errors' classes

Failure = Literal["micro_step", "optimizer", "stopped", "sent"]


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass(frozen=True)
class NotCompiled:
    """`sent`: other ranks wait for it, or weights have changed, so it cannot be repeated."""

    reason: str
    sent: bool = False


def not_compiled(error: BaseException) -> NotCompiled | None:
    """Return the reason where an exception is the compiler's or that of a kernel it made."""
    if not any(cls.__module__.startswith(_FROM) for cls in type(error).__mro__):
        return None
    inner = getattr(error, "inner_exception", None) or error
    message = next((line.strip() for line in str(inner).splitlines() if line.strip()), "")
    return NotCompiled(f"{type(inner).__name__}: {message}"[:200])


MEASURED = 2  # batches that show the peak

Failed = Literal["out of memory"] | NotCompiled
Mean = float | None | Failed
Sum = tuple[float, float] | None | Failed  # losses and their weights


@dataclass(frozen=True)
class Generators:
    cpu: torch.Tensor
    own: dict[str, torch.Tensor]  # by the kind of device

    @classmethod
    def now(cls, device: torch.device) -> "Generators":
        return cls(torch.get_rng_state(), accelerator.accelerator_of(device).generator())

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        accelerator.accelerator_of(device).restore(self.own)


class _Stopped(Exception):
    pass


class _Watched:
    """Batches that note when the step asks for one too many: then its micro-steps are done."""

    def __init__(self, batches: Iterable[Batch], stopping: Callable[[], bool]) -> None:
        self.batches, self.stopping = batches, stopping
        self.begun = 0
        self.used_up = False

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if self.begun and self.stopping():
                raise _Stopped
            self.begun += 1
            yield batch
        self.used_up = True


def free_memory(device: torch.device) -> None:
    gc.collect()  # autograd's graphs may be in reference cycles
    if device.type == "cpu":
        give_back()
    else:
        accelerator.accelerator_of(device).empty_cache()


def attempt(
    state: TrainState, batches: Iterable[Batch], step: Callable[[Iterable[Batch]], StepResult],
    failed: Callable[[BaseException, int], None] = lambda error, begun: None,
    stopping: Callable[[], bool] = lambda: False,
) -> StepResult | Failure | NotCompiled:  # fmt: skip
    """Do one optimizer step, or return why not: after all but 'optimizer' and 'sent' everything is as before it.
    'micro_step', 'optimizer': where memory ran out. 'sent': in a micro-step of which other ranks have gradients.
    `failed` gets the out-of-memory exception, which it must not hold, and the number of begun micro-steps."""
    generators, watched = Generators.now(state.device), _Watched(batches, stopping)
    outcome: Failure | NotCompiled = "micro_step"
    try:
        return step(watched)
    except _Stopped:
        outcome = "stopped"
    except Exception as error:
        if (reason := not_compiled(error)) is not None and not watched.used_up:
            outcome = reason  # also where memory ran out while kernels were tried
        elif is_out_of_memory(error):
            failed(error, watched.begun)
        else:
            raise
    # Here the exception is gone, and with it the frames that held activations.
    changed = state.early is not None and state.early.changed
    if changed and isinstance(outcome, NotCompiled):
        return replace(outcome, sent=True)
    if watched.used_up or changed:
        return "optimizer"
    if state.parallel and not state.parallel.broken_off():
        return replace(outcome, sent=True) if isinstance(outcome, NotCompiled) else "sent"
    state.optimizer.zero_grad(set_to_none=True)
    if state.masters:
        state.masters.drop_gradients()
    free_memory(state.device)
    generators.restore(state.device)
    return outcome


def use_split(state: TrainState, config: RunConfig, *, compiled: bool) -> None:
    state.config = config
    if compiled:  # Dynamo keeps at most eight sizes
        torch.compiler.reset()
        free_memory(state.device)


def go_eager(state: TrainState) -> None:
    state.model.stay_eager()
    state.call = state.parallel.call if state.parallel else state.model
    remove_frame_hook()


def remove_frame_hook() -> None:
    """Remove Dynamo's hook (PEP 523), which a failed compiler leaves: with it a step takes more memory than planned."""
    with contextlib.suppress(AttributeError):  # another Python, without this interface
        python = ctypes.pythonapi
        python.PyInterpreterState_Get.restype = ctypes.c_void_p
        change = python._PyInterpreterState_SetEvalFrameFunc
        change.argtypes, change.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        change(python.PyInterpreterState_Get(), ctypes.cast(python._PyEval_EvalFrameDefault, ctypes.c_void_p))


def sum_of_losses(
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], torch.Tensor],
    *,
    batch_size: int,
    measure: AbstractContextManager[None] | None,
    stopping: Callable[[], bool],
    failed: Callable[[BaseException, int], None] = lambda error, begun: None,
) -> Sum:
    """Return (losses in nats per token, summed by their weights; the sum of these), or None with the reason. `measure`
    is entered around the first two batches."""
    try:
        return _sum(batches, loss_of, batch_size, measure, stopping)
    except Exception as error:
        if (reason := not_compiled(error)) is not None:
            return reason
        if not is_out_of_memory(error):
            raise
        failed(error, 0)
    return "out of memory"


def _sum(
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], torch.Tensor],
    batch_size: int,
    measure: AbstractContextManager[None] | None,
    stopping: Callable[[], bool],
) -> tuple[float, float] | None:
    total: torch.Tensor | float = 0.0
    weight = 0.0
    with measure or nullcontext():
        for _, batch in zip(range(MEASURED if measure else 0), batches, strict=False):
            share = len(batch[0]) / batch_size
            total, weight = total + loss_of(batch) * share, weight + share
    for batch in batches:
        if stopping():
            return None
        share = len(batch[0]) / batch_size
        total, weight = total + loss_of(batch) * share, weight + share
    return float(total), weight


# After any error of a card but out-of-memory its context is gone: every further call fails or hangs, so none is made.
# Only a new process can use the card again.

CARD_FAILED = "environment.card_failed"
SMALLER_AT_RESUME = ("memory.optimizer_step", "memory.others_wait")  # the record has a smaller micro-batch then
# Messages of CUDA and its libraries about a lost context, where the error's type does not tell.
_LOST = (
    "CUDA error:", "CUDA driver error:", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED",
    "device-side assert triggered", "Cuda failure",
)  # fmt: skip


# PyTorch's message about an operator that it lacks on Apple's GPUs.
_LACKING = re.compile(r"operator '([\w:.]+)' is not (?:currently )?implemented for the MPS device")


@dataclass(frozen=True)
class Ending:
    status: Literal["diverged", "failed"]
    reason: str
    error: BaseException


def card_is_lost(error: BaseException) -> bool:
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _LOST)


def ending_of(error: BaseException, path: Path, step: int, out_of_memory: Callable[[str], UserError]) -> Ending:
    """Explain the end of a run after `step` steps. `out_of_memory` makes the sentence for an id."""
    if isinstance(error, UserError):
        return Ending("diverged" if error.id.startswith("diverged") else "failed", error.id, error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        id = "disk.full_run" if error.errno == errno.ENOSPC else "disk.limit_run"
        return Ending("failed", id, UserError(id, path=str(path)))
    if is_out_of_memory(error):
        return Ending("failed", "memory.out_of_memory", out_of_memory("memory.out_of_memory"))
    if isinstance(error, NotImplementedError) and (lacking := _LACKING.search(str(error))):
        values = {"operator": lacking[1], "torch": torch.__version__}
        return Ending("failed", "environment.mps_operator", UserError("environment.mps_operator", **values))
    if card_is_lost(error):
        message = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return Ending("failed", CARD_FAILED, UserError(CARD_FAILED, step=step, message=message[:200]))
    return Ending("failed", type(error).__name__, error)


def end_process(error: UserError) -> None:
    """Print why and end, from any thread: what is half done is not saved, and checkpoints are whole anyway."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nerror: {error}\n".encode())
    os._exit(int(error.exit_code))


def end_quietly(error: UserError) -> None:
    """End like `end_process`, for a rank whose sentence another one prints."""
    os._exit(int(error.exit_code))
