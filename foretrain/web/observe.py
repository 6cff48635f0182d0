"""What the page reads of a run: what its user says of it, and the curves of its metrics, read on as the file grows."""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foretrain.analysis.live import ObservedRun, newest_lines
from foretrain.base.messages import format_value, printable, say
from foretrain.base.statistics import extremes
from foretrain.reports.document import Axis, Cell, Curves, Figure, Figures, Message, Quantity, Trace
from foretrain.runs import state as label
from foretrain.runs.record import RunRecord

MAX_POINTS = 1200  # of a curve; more cannot be seen
_SHOWN = ("kind", "step", "loss", "val_loss", "train_loss", "step_s", "tokens_per_s", "mfu", "memory_bytes", "eta_s",
          "elapsed_s", "evaluation_s", "learning_rate", "grad_norm", "best")  # fmt: skip


def said_of(run: ObservedRun, name: str) -> dict[str, Any]:
    said = label.read_label(run.path)
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
            if size_of(self._path) < self.end_bytes:  # a resumed run forgets the steps that it does again
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


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def newest(path: Path) -> dict[str, Any] | None:
    steps = [shown for line in newest_lines(path) if (shown := _shown(line)) and line["kind"] == "step"]
    return steps[-1] if steps else None


def _lines(path: Path, start: int) -> Iterator[bytes]:
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
        with contextlib.suppress(ValueError, RecursionError):
            found.append(_shown(json.loads(line)))
    return [line for line in found if line]


def _shown(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict) or line.get("kind") not in ("step", "evaluation"):
        return {}
    plain = {key: line[key] for key in _SHOWN if _is_plain(line.get(key))}
    return plain if isinstance(line.get("step"), int) else {}


def _is_plain(value: Any) -> bool:
    """A number that JSON has, a short word, or a yes."""
    if isinstance(value, float):
        return value - value == 0  # not infinite, not NaN
    return isinstance(value, bool | int) or (isinstance(value, str) and len(value) < 40)


MOST_POINTS = 600  # of a curve; more cannot be told apart

Lines = Sequence[dict[str, Any]]  # of metrics.jsonl


def pictures(lines: Lines) -> list[Curves]:
    steps, evaluations = _of_kind(lines, "step"), _of_kind(lines, "evaluation")
    loss = [
        _trace(Message("axis.train"), steps, "loss", 1, colour=0),
        _trace(Message("axis.val"), evaluations, "val_loss", 0, colour=1),
    ]
    time = _trace(Message("page.picture.step_time"), steps, "step_s", 1)
    memory = _trace(Message("page.picture.memory"), steps, "memory_bytes", 1)
    found = [
        _curves("loss", Axis(Message("axis.loss"), "number"), loss),
        _curves("step_time", Axis(Message("page.picture.step_time"), "duration", from_zero=True), [time]),
    ]
    if memory.values:
        found.append(_curves("memory", Axis(Message("page.picture.memory"), "bytes", from_zero=True), [memory]))
    return found


def _of_kind(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["kind"] == kind]


def _curves(name: str, y: Axis, traces: list[Trace]) -> Curves:
    steps = Axis(Message("axis.step"), "number")
    return Curves(
        Message(f"page.picture.{name}"), (steps,), y, tuple(traces), small=name != "loss", smooth=name == "loss"
    )


def _trace(label: Message, lines: Lines, key: str, shift: int, colour: int = 0) -> Trace:
    """`shift`: 1 where a line is of a step that is done, 0 where it is said before one."""
    found = [(line["step"] + shift, line[key]) for line in lines if isinstance(line.get(key), int | float)]
    kept = [found[i] for i in extremes([y for _, y in found], MOST_POINTS)]
    places, values = tuple(float(x) for x, _ in kept), tuple(float(y) for _, y in kept)
    return Trace(label, (places,), values, colour, dashed=key == "val_loss")


def figures(record: RunRecord, lines: Lines) -> Figures:
    """The newest step's and evaluation's; of a run that is over, the medians that the list and the report have."""
    step = next(reversed(_of_kind(lines, "step")), {})
    evaluation = next(reversed(_of_kind(lines, "evaluation")), {})
    running = record.status == "running"
    of = step
    if not running and record.step_s:
        of = {key: getattr(record, key, None) for key in ("step_s", "tokens_per_s", "mfu")}
    speed = of.get("tokens_per_s")
    found: list[tuple[str, Cell | None]] = [
        ("loss", _quantity(step.get("loss"), "digits4")),
        ("val_loss", _quantity(evaluation.get("val_loss"), "digits4")),
        ("step", _quantity(of.get("step_s"), "duration")),
        ("speed", Message("value.throughput", {"tokens_per_s": speed}) if speed else None),
        ("mfu", _quantity(of.get("mfu") or None, "percent")),
        ("left", _quantity(step.get("eta_s"), "duration") if running else None),
    ]
    source = Message("page.measured")
    return Figures(tuple(Figure(Message(f"page.now.{id}"), cell, source) for id, cell in found if cell is not None))


def _quantity(value: Any, format: str) -> Quantity | None:
    return Quantity(value, format) if isinstance(value, int | float) and not isinstance(value, bool) else None


def progress(done: int, of: int) -> str:
    return say("page.steps_of", done=format_value(done, "number"), of=format_value(of, "number"))
