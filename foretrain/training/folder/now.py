"""`now.json` in a run's folder: what the run does at this moment, and which process of which machine does it.

It is there for whoever looks (`foretrain top`, the page): nothing of the run depends on it. So it is not synced, what
the disk refuses is left out, and it is removed when the run lets go of its folder. A run that was killed leaves it
behind; its process then tells that nobody is there any more.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from foretrain.base.durable import replace
from foretrain.base.process_memory import system
from foretrain.base.records import Record
from foretrain.base.safe_read import read_text

FILE = "now.json"
SCHEMA = "foretrain.now/1"
SHORT_S = 0.1  # a phase that was over as quickly is not worth a write the next time
_SAME_START_S = 2.0  # the system counts a process's start in ticks since its own
_MOST_BYTES = 4096
Phase = Literal["starting", "compiling", "training", "evaluating", "saving", "running"]


class Now(Record):
    """A run at one moment. `running`: of a program that says no more.

    `since_s`: Unix time at which the phase began; `process_began_s`: the same of the process, since process numbers are
    used again; `numbers`: within which they count, a boot of a kernel and a container on it.
    """

    phase: Phase
    since_s: float
    step: int = 0
    pid: int
    process_began_s: float
    host: str
    numbers: str = ""


class Teller:
    """Writes now.json whenever a run's phase changes. `folder`: asked for at the first word."""

    def __init__(self, folder: Callable[[], Path], clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._phase, self._written = "", ""
        self._since_s = 0.0
        self._short: set[str] = set()

    def tell(self, phase: Phase, step: int = 0, pid: int | None = None) -> None:
        """From now on the run is in this phase. `pid`: of the process that does it, by default this one."""
        if phase == self._phase:
            return
        now_s = self._clock()
        quick = self._short.add if now_s - self._since_s < SHORT_S else self._short.discard
        quick(self._phase)
        self._phase, self._since_s = phase, now_s
        if phase == self._written or phase in self._short:
            return
        self._written = phase
        with contextlib.suppress(OSError):
            self._write(phase, now_s, step, pid or os.getpid())

    def _write(self, phase: Phase, now_s: float, step: int, pid: int) -> None:
        now = Now(
            phase=phase, since_s=round(now_s, 3), step=step, pid=pid, process_began_s=_began_s(pid) or 0.0,
            host=socket.gethostname(), numbers=_numbers(),
        )  # fmt: skip
        replace(self._folder() / FILE, f"{json.dumps(now.to_json(schema=SCHEMA))}\n".encode(), sync=False)

    def end(self) -> None:
        if self._written:
            self._phase = self._written = ""
            with contextlib.suppress(OSError):
                (self._folder() / FILE).unlink()


def read(folder: Path) -> Now | None:
    """What a run said last; None where it says nothing that can be read."""
    try:
        return Now.from_json(read_text(folder / FILE, _MOST_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def is_here(now: Now) -> bool:
    """Whether the process is one of those that can be seen from here."""
    return now.host == socket.gethostname() and now.numbers == _numbers()


def lives(now: Now) -> bool | None:
    """Whether the process that said this is still there; None where that cannot be told from here."""
    if not is_here(now):
        return None
    began_s = _began_s(now.pid)
    return began_s is not None and abs(began_s - now.process_began_s) < _SAME_START_S


def seconds_since(now: Now) -> float:
    """How long the phase has lasted, by this machine's clock."""
    return time.time() - now.since_s


def _began_s(pid: int) -> float | None:
    try:
        return system().Process(pid).create_time()
    except (system().Error, OSError, ValueError, OverflowError):
        return None


def _numbers() -> str:
    """Within which process numbers count; "" where the system has no name for it."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        found.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115
    return " ".join(found)
