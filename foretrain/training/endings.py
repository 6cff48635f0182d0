"""How a run ends that does not end well: what its record says, and the sentence in place of a traceback.

After any error of a card but a lack of memory its context is gone: every further call to it fails or hangs, so none is
made, neither here nor on the way out. Only a new process can use the card again.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from foretrain.base.errors import UserError
from foretrain.training.attempts import is_out_of_memory

CARD_FAILED = "environment.card_failed"
SMALLER_AT_RESUME = ("memory.optimizer_step", "memory.others_wait")  # the record has a smaller micro-batch then
# What CUDA and its libraries say when a context is lost, where the error's type does not tell.
_LOST = (
    "CUDA error:", "CUDA driver error:", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED",
    "device-side assert triggered", "Cuda failure",
)  # fmt: skip


# What PyTorch says of an operator that it lacks on Apple's GPUs.
_LACKING = re.compile(r"operator '([\w:.]+)' is not (?:currently )?implemented for the MPS device")


@dataclass(frozen=True)
class Ending:
    """`error`: what is to be raised, which is the exception itself where there is no better sentence."""

    status: Literal["diverged", "failed"]
    reason: str
    error: BaseException


def card_is_lost(error: BaseException) -> bool:
    """Whether an exception says that a card's context cannot be used any more."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _LOST)


def ending_of(error: BaseException, path: Path, step: int, out_of_memory: Callable[[str], UserError]) -> Ending:
    """Of a run in `path` after `step` steps. `out_of_memory` makes the sentence for an id."""
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
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return Ending("failed", CARD_FAILED, UserError(CARD_FAILED, step=step, said=said[:200]))
    return Ending("failed", type(error).__name__, error)


def end_process(error: UserError) -> None:
    """Say why and be gone, from whatever thread: what is half done is not saved, and checkpoints are whole anyway."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nerror: {error}\n".encode())
    os._exit(int(error.exit_code))


def end_quietly(error: UserError) -> None:
    """As `end_process`, for a rank whose sentence another one says."""
    os._exit(int(error.exit_code))
