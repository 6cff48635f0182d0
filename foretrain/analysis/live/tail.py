"""What the lines of a metrics.jsonl say of now: its last step and evaluation, and what adds up, read on as it grows."""

import json
from collections import deque
from pathlib import Path
from typing import Any

LAST_BYTES = 65536  # hold the newest lines of any run
RECENT = 20
_MOST = 1e18  # more is no figure of a run, and NaN is not below it


class Tail:
    """The end of one file. `whole`: what adds up over a run is wanted, so the first look reads all of it."""

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path, self.whole = path, whole
        self._begin()

    def _begin(self) -> None:
        self.line: dict[str, Any] = {}  # the last one of any kind
        self.step: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.recent_s: deque[float] = deque(maxlen=RECENT)  # seconds of the last steps
        self.peak_bytes: int | None = None
        self.energy_j: float | None = None
        self._read_s = 0.0  # until where energy is added up
        self._end_bytes = 0

    def look(self) -> "Tail":
        """Read what has come since the last look."""
        try:
            size = self.path.stat().st_size
            if size < self._end_bytes:  # a resumed run forgets the steps that it does again
                self._begin()
            cut = not self.whole and size - self._end_bytes > LAST_BYTES
            with self.path.open("rb") as file:
                file.seek(size - LAST_BYTES if cut else self._end_bytes)
                if cut:
                    file.readline()  # seldom whole
                self._end_bytes = file.tell()
                while line := file.readline(LAST_BYTES):
                    if not line.endswith(b"\n") and len(line) < LAST_BYTES:  # it is being written
                        break
                    self._end_bytes += len(line)
                    self._take(line)
        except OSError:
            pass
        return self

    def _take(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            kind = found.get("kind")
        except (ValueError, AttributeError, RecursionError):  # a crash or a hand has spoilt it
            return
        self.line = found
        if kind == "evaluation":
            self.evaluation = found
        elif kind in ("step", "log"):
            self.step = {**self.step, **found} if found.get("step") == self.step.get("step") else found
            self._add(found)

    def _add(self, line: dict[str, Any]) -> None:
        step_s, held, power_w = (number(line.get(key)) for key in ("step_s", "memory_bytes", "power_w"))
        if step_s is not None:
            self.recent_s.append(step_s)
        if held is not None:
            self.peak_bytes = max(self.peak_bytes or 0, round(held))
        elapsed_s = number(line.get("elapsed_s"))
        if power_w is not None and elapsed_s is not None and elapsed_s > self._read_s:
            self.energy_j = (self.energy_j or 0.0) + power_w * (elapsed_s - self._read_s)
            self._read_s = elapsed_s


def first_line(path: Path) -> dict[str, Any]:
    """The first line of a file; an empty one where there is none, or it is no object."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.readline(LAST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST else None


def whole_number(value: Any) -> int | None:
    """A number of steps or bytes; None for anything else."""
    return value if isinstance(value, int) and number(value) is not None else None
