"""What the page reads of a run: what its user says of it, and the curves of its metrics, read on as the file grows."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretrain.analysis.live.observed import ObservedRun
from foretrain.base.messages import printable
from foretrain.training.folder import label

MAX_POINTS = 1200  # of a curve; more cannot be seen
_SHOWN = ("kind", "step", "loss", "val_loss", "train_loss", "step_s", "tokens_per_s", "mfu", "memory_bytes", "eta_s",
          "elapsed_s", "evaluation_s", "learning_rate", "grad_norm", "best")  # fmt: skip


def said_of(run: ObservedRun, name: str) -> dict[str, Any]:
    """Where a run is, and what its user calls it and says of it; `name`: what it is called where nobody does."""
    said = label.read(run.path)
    return {
        "name": printable(said.title or name), "path": printable(str(run.path)), "note": printable(said.note),
        "tags": [printable(" ".join(tag.split())) for tag in said.tags],
    }  # fmt: skip


class Curve:
    """What a picture needs of a metrics.jsonl: all evaluations and evenly spaced steps, read on as the file grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._turn = path, threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._steps: list[bytes] = []
        self._evaluations: list[bytes] = []
        self._newest: list[bytes] = []  # the last step, which spacing may leave out
        self._stride, self._number, self.end_bytes = 1, 0, 0

    def lines(self) -> list[dict[str, Any]]:
        """The steps, then the evaluations, each upwards. `end_bytes` is then how far the file has been read."""
        with self._turn:
            if _size(self._path) < self.end_bytes:  # a resumed run forgets the steps that it does again
                self._begin()
            for line in _lines(self._path, self.end_bytes):
                self._take(line)
            evaluations = self._evaluations[:: max(1, len(self._evaluations) // MAX_POINTS)]
            newest = [] if self._steps[-1:] == self._newest else self._newest
            return [*_parsed(self._steps), *_parsed(newest), *_parsed(evaluations)]

    def _take(self, line: bytes) -> None:
        self.end_bytes += len(line)
        if b'"evaluation"' in line:
            self._evaluations.append(line)
            return
        self._newest = [line]
        if self._number % self._stride == 0:
            self._steps.append(line)
            if len(self._steps) > 2 * MAX_POINTS:
                self._steps, self._stride = self._steps[::2], 2 * self._stride
        self._number += 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def newest(path: Path) -> dict[str, Any] | None:
    """The last step that metrics.jsonl tells of."""
    start = max(0, _size(path) - 16 * 1024)
    lines = list(_lines(path, start))[1 if start else 0 :]  # the first of a piece is seldom whole
    steps = [line for line in _parsed(lines) if line["kind"] == "step"]
    return steps[-1] if steps else None


def _lines(path: Path, start: int) -> Iterator[bytes]:
    """Whole lines from a place on; the last one may still be being written."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line
    except OSError:
        return


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    """What of these lines can be shown; those that a crash or a hand has spoilt are left out."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
            if value["kind"] in ("step", "evaluation") and isinstance(value["step"], int):
                found.append({key: value[key] for key in _SHOWN if _is_plain(value.get(key))})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def _is_plain(value: Any) -> bool:
    """A number that JSON has, a short word, or a yes."""
    if isinstance(value, float):
        return value - value == 0  # not infinite, not NaN
    return isinstance(value, bool | int) or (isinstance(value, str) and len(value) < 40)
