"""Loaded by Python itself in each process of a soak: faults that cannot be put into a process from outside.

SIGUSR1: memory runs out once, in the next forward or backward pass. SIGUSR2: for five seconds every fsync takes one.
"""

import os
import signal
import time
from types import FrameType

SLOW_FOR_S, EACH_S = 5.0, 1.0
_slow_until_s = 0.0
_fsync = os.fsync


def _slow_fsync(handle: int) -> None:
    if time.monotonic() < _slow_until_s:
        time.sleep(EACH_S)
    _fsync(handle)


def _slow_disk(number: int, frame: FrameType | None) -> None:
    global _slow_until_s
    _slow_until_s = time.monotonic() + SLOW_FOR_S


def _no_memory(number: int, frame: FrameType | None) -> None:
    """Only where a card's memory does run out: within a step, in PyTorch's own code, before the optimizer."""
    innermost, names, files = (frame.f_code.co_filename if frame else ""), set[str](), set[str]()
    while frame is not None:
        names.add(frame.f_code.co_name)
        files.add(os.path.basename(os.path.dirname(frame.f_code.co_filename)))  # noqa: PTH119, PTH120
        frame = frame.f_back
    in_a_pass = "/torch/nn/" in innermost or "/torch/autograd/" in innermost or innermost.endswith("torch/_tensor.py")
    if "carry_out" in names and in_a_pass and "optim" not in files and "utils" not in files:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (put in by the soak)")
    signal.setitimer(signal.ITIMER_REAL, 0.003)  # SIGALRM: look again in a moment


os.fsync = _slow_fsync
signal.signal(signal.SIGUSR1, _no_memory)
signal.signal(signal.SIGALRM, _no_memory)
signal.signal(signal.SIGUSR2, _slow_disk)
