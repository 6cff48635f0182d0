"""Processor use by other programs while a run trains: its cores' busy time less its own, else the load average."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from foretrain.base.process_memory import system
from foretrain.hardware.cpu import usable_cores
from foretrain.runs.record import MachineLoad, crowded

LEAST_S, WINDOW_S = 1.0, 3.0  # jiffies are 10 ms, and a second of somebody's browser is not worth a line
QUIET_S, REPORT_EVERY_S = 20.0, 300.0
STALL_FACTOR, STALL_S = 4.0, 0.1  # a step so many times the median, and so much longer, is a stall
LEAST_STEPS, RECENT = 5, 50  # steps that the median is of
SHORTER, TRIED_AGAIN_S = 0.95, 300.0  # a way to wait wins at this share of a step, and is retried after so long

Event = tuple[str, dict[str, Any]]


def cores_busy_s() -> float | None:
    """Return busy seconds of the cores of this process's affinity; None where no one counts."""
    try:
        cores = system().cpu_times(percpu=True)
    except (system().Error, OSError):
        return None
    if hasattr(os, "sched_getaffinity") and len(own := os.sched_getaffinity(0)) < len(cores):
        cores = [core for number, core in enumerate(cores) if number in own]
    return sum(_busy_s(core) for core in cores) if cores else None


def _busy_s(core: Any) -> float:
    """Count all but idling and disk waits. Linux counts a virtual machine's time (guest) as user, too."""
    idle = {"idle", "iowait", "guest", "guest_nice"}
    return sum(seconds for name, seconds in core._asdict().items() if name not in idle)


def load_average() -> float:
    """Return how many programs run or want to, over the last minute; 0 where unknown."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def own_s() -> float:
    return sum(os.times()[:4])


class Reading(NamedTuple):
    at_s: float
    own_s: float
    busy_s: float | None


class Clock:
    def __init__(
        self, wall: Callable[[], float] = time.monotonic, own: Callable[[], float] = own_s,
        busy: Callable[[], float | None] = cores_busy_s, load: Callable[[], float] = load_average,
        cores: int | None = None,
    ) -> None:  # fmt: skip
        self.wall, self.own, self.busy, self.load, self.cores = wall, own, busy, load, cores or usable_cores()

    def read(self) -> Reading:
        return Reading(self.wall(), self.own(), self.busy())


class Contention:
    """Watches one process's run, on as many `threads` as it wants, from `since` on. `gives_way`: threads that wait for
    each other sleep (cpu_threads.py). Beside programs that take whole cores that is many times faster, beside lighter
    ones slower; both are tried."""

    def __init__(self, threads: int, *, clock: Clock | None = None, since: Reading | None = None) -> None:
        self.clock = clock or Clock()
        self.cores = self.clock.cores
        self.threads = threads
        self.gives_way = False
        self._before = since or self.clock.read()
        self._whole, self._window, self._line = Sums(), Sums(), Sums()
        self._recent: list[float] = []
        self._steps: list[float] = []  # of the window
        self._took: dict[bool, tuple[float, float]] = {}  # by `gives_way`: a step beside others, and its time
        self._reported, self._quiet_s, self._reported_s = False, 0.0, float("-inf")

    def begin(self) -> list[Event]:
        """Return events about the machine before the first step, watched for a second."""
        self._look()
        if self._window.wall_s < LEAST_S:
            return []
        window, self._window = self._window, Sums()
        self.gives_way = self._is_crowded(window)
        return self._busy_now(window) if self.gives_way else []

    def step(self, took_s: float) -> list[Event]:
        self._window.add_step(took_s, median(self._recent) if len(self._recent) >= LEAST_STEPS else None)
        self._recent = [*self._recent[-RECENT + 1 :], took_s]
        self._steps.append(took_s)
        if self.clock.wall() - self._before.at_s + self._window.wall_s < WINDOW_S:
            return []
        self._look()
        window, self._window = self._window, Sums()
        steps, self._steps = self._steps, []
        if not self._is_crowded(window):
            return self._quiet(window)
        self._choose(median(steps))
        # Without other programs a slow step is something else: a disk, a page fault.
        self._whole.stalls, self._whole.stalled_s = (
            self._whole.stalls + window.stalls, self._whole.stalled_s + window.stalled_s,
        )  # fmt: skip
        return self._busy_now(window)

    def take_others(self) -> float | None:
        """Return the cores that others used since the last call; None where unknown."""
        self._look()
        line, self._line = self._line, Sums()
        return line.others_s / line.wall_s if line.wall_s > 0 else None

    def _look(self) -> None:
        before, now = self._before, self.clock.read()
        self._before = now
        wall_s, used = now.at_s - before.at_s, now.own_s - before.own_s
        if wall_s <= 0:
            return
        if before.busy_s is not None and now.busy_s is not None:
            # A virtual machine counts stolen time as the cores', and perhaps as this process's, too: nobody can have
            # used more than this process left.
            others = max(0.0, min(now.busy_s - before.busy_s, wall_s * self.cores) - used)
        else:
            others = min(max(0.0, self.clock.load() - self.threads), self.cores) * wall_s
        for sums in (self._whole, self._window, self._line):
            sums.add(wall_s, used, others)

    def _is_crowded(self, window: "Sums") -> bool:
        return crowded(window.others_s / window.wall_s, self.cores, self.threads)

    def _choose(self, took_s: float) -> None:
        """Switch the way to wait, where the other is unknown or made steps shorter."""
        now = self.clock.wall()
        self._took[self.gives_way] = took_s, now
        other_s, at = self._took.get(not self.gives_way, (0.0, now))
        if other_s < SHORTER * took_s or now - at > TRIED_AGAIN_S:
            self.gives_way = not self.gives_way

    def _busy_now(self, window: "Sums") -> list[Event]:
        self._quiet_s = 0.0
        if self._reported or self.clock.wall() - self._reported_s < REPORT_EVERY_S:
            return []
        self._reported, self._reported_s = True, self.clock.wall()
        return [("machine_busy", window.shares(self.cores))]

    def _quiet(self, window: "Sums") -> list[Event]:
        self._quiet_s += window.wall_s
        if self._quiet_s < QUIET_S:
            return []
        self.gives_way, self._took = False, {}
        if not self._reported:
            return []
        self._reported = False
        return [("machine_quiet", window.shares(self.cores))]

    def result(self) -> MachineLoad | None:
        self._look()
        if self._whole.wall_s < LEAST_S:
            return None
        shares = self._whole.shares(self.cores)
        return MachineLoad(
            cores=self.cores, threads=self.threads, others_share=round(shares["others"], 4),
            own_share=round(shares["own"], 4), stalls=self._whole.stalls, stalled_s=round(self._whole.stalled_s, 3),
        )  # fmt: skip


class Unwatched:
    gives_way = False

    def begin(self) -> list[Event]:
        return []

    def step(self, took_s: float) -> list[Event]:
        return []

    def take_others(self) -> float | None:
        return None

    def result(self) -> MachineLoad | None:
        return None


@dataclass
class Sums:
    wall_s: float = 0.0
    own_s: float = 0.0
    others_s: float = 0.0
    steps: int = 0
    steps_s: float = 0.0
    stalls: int = 0
    stalled_s: float = 0.0

    def add(self, wall_s: float, own_s: float, others_s: float) -> None:
        self.wall_s, self.own_s, self.others_s = self.wall_s + wall_s, self.own_s + own_s, self.others_s + others_s

    def add_step(self, took_s: float, usual_s: float | None) -> None:
        self.steps, self.steps_s = self.steps + 1, self.steps_s + took_s
        if usual_s is not None and took_s > STALL_FACTOR * usual_s and took_s - usual_s > STALL_S:
            self.stalls, self.stalled_s = self.stalls + 1, self.stalled_s + took_s - usual_s

    def shares(self, cores: int) -> dict[str, float]:
        whole_s = self.wall_s * cores
        return {"others": self.others_s / whole_s, "own": min(1.0, self.own_s / whole_s)}
