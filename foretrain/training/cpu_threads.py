"""The threads of a run on a CPU: how many, spinning or asleep. Spinning is fastest while each has a core: with two busy
programs on two cores a step of 35 ms took 2.2 s, and 70 ms asleep. GNU OpenMP hardly spins while it has more threads
than cores (GOMP_SPINCOUNT in its manual), so a few idle threads let a run's sleep."""

import math
import os
import threading
from functools import cached_property
from pathlib import Path

import torch

from foretrain.config.options import RunConfig
from foretrain.hardware.cpu import usable_cores

DECIDED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # where one of these is set, somebody chose
ENOUGH = 1 << 18  # elements that PyTorch divides among its threads


def can_sleep() -> bool:
    """Return whether threads can be made to sleep: GNU OpenMP computes, and nobody chose how it waits."""
    if any(name in os.environ for name in DECIDED) or torch.get_num_threads() < 2:
        return False
    try:
        return "libgomp" in Path("/proc/self/maps").read_text("utf-8", "replace")
    except OSError:
        return False


def idle_teams(threads: int, cores: int) -> int:
    return math.ceil(max(1, cores - threads + 1) / (threads - 1)) if threads > 1 else 0


class Waiting:
    def __init__(self) -> None:
        self._end = threading.Event()
        self._idle: list[threading.Thread] = []

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        self.spin()

    @cached_property
    def _able(self) -> bool:
        return can_sleep()

    @property
    def asleep(self) -> bool:
        return bool(self._idle)

    def sleep(self) -> bool:
        if self._idle or not self._able:
            return self.asleep
        self._end = threading.Event()
        ready = [threading.Event() for _ in range(idle_teams(torch.get_num_threads(), usable_cores()))]
        for event in ready:
            idle = threading.Thread(target=_stay, args=(event, self._end), name="foretrain-idle", daemon=True)
            idle.start()
            self._idle.append(idle)
        for event in ready:
            event.wait()
        return True

    def spin(self) -> None:
        self._end.set()
        for idle in self._idle:
            idle.join()
        self._idle = []


def _stay(ready: threading.Event, end: threading.Event) -> None:
    """Hold a team of idle threads, which last as long as this one does."""
    torch.zeros(ENOUGH).add_(1.0)
    ready.set()
    end.wait()


def set_threads(config: RunConfig, before: int | None) -> int:
    """Set and return PyTorch's number of threads: the config's, `before`'s, or fewer where cores lack."""
    count = config.cpu_threads or (min(before, usable_cores()) if before else torch.get_num_threads())
    torch.set_num_threads(count)
    return count
