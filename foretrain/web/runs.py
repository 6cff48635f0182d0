"""The runs in the folders that the page was given: their list, one run with its forecast, what is new in a live one."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from foretrain.analysis.forecast_check import Row, of_directory
from foretrain.analysis.live import ObservedRun, newest_lines
from foretrain.analysis.measured_step import with_measured_step
from foretrain.analysis.run import explain_directory
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, has, isolated, printable, say
from foretrain.base.statistics import extremes
from foretrain.reports import making
from foretrain.reports.document import Axis, Cell, Curves, Figure, Figures, Message, Quantity, Trace
from foretrain.reports.html import block_json, document_json
from foretrain.reports.views import runs as runs_view
from foretrain.runs import state as label
from foretrain.runs.folder import find_runs
from foretrain.runs.record import RunRecord, TrainedRun, source_of
from foretrain.web.answers import SCHEMA

MAX_POINTS = 1200  # of a curve; more cannot be seen
_SHOWN = ("kind", "step", "loss", "val_loss", "train_loss", "step_s", "tokens_per_s", "mfu", "memory_bytes", "eta_s",
          "elapsed_s", "evaluation_s", "learning_rate", "grad_norm", "best")  # fmt: skip


def label_json(run: ObservedRun, name: str) -> dict[str, Any]:
    own = label.read_label(run.path)
    return {
        "name": printable(own.title or name), "path": printable(str(run.path)), "note": printable(own.note),
        "tags": [printable(" ".join(tag.split())) for tag in own.tags],
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
    """What of these lines can be shown; those damaged by a crash or by hand are left out."""
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
    """`shift`: 1 where a line is about a finished step, 0 where it comes before one."""
    found = [(line["step"] + shift, line[key]) for line in lines if isinstance(line.get(key), int | float)]
    kept = [found[i] for i in extremes([y for _, y in found], MOST_POINTS)]
    places, values = tuple(float(x) for x, _ in kept), tuple(float(y) for _, y in kept)
    return Trace(label, (places,), values, colour, dashed=key == "val_loss")


def figures(record: RunRecord, lines: Lines) -> Figures:
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


MAX_RUNS = 300
MAX_EVENTS = 200
MAX_CURVES = 8
_COMPARED = ("time.step", "process.reserved", "process.resident", "phase.steady_step", "time.run")


class Runs:
    """Runs by id. An id is looked up among those that are there; it is never part of a path."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = roots
        self._curves: dict[str, Curve] = {}  # of those that somebody looks at, the newest last

    def curve(self, id: str, run: ObservedRun) -> Curve:
        found = self._curves.pop(id, None) or Curve(run.path / "metrics.jsonl")
        self._curves = dict([*list(self._curves.items())[1 - MAX_CURVES :], (id, found)])
        return found

    def all(self) -> dict[str, ObservedRun]:
        """Every run whose folder lies in one of the roots and is not a link, by id."""
        found = {}
        inside = [root.resolve() for root in self._roots]
        for directory in find_runs(self._roots):
            run, path = ObservedRun(directory.path), directory.path.resolve()
            if not (run.is_plain() and any(path.is_relative_to(root) for root in inside)):
                continue
            if source_of(run.path) != "watched":
                found[hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()[:16]] = run
        return found

    def get(self, id: str) -> ObservedRun | None:
        return self.all().get(id)

    def listed(self) -> dict[str, Any]:
        rows, unreadable = [], []
        for id, run in self.all().items():
            try:
                record = _record(run)
            except UserError as error:
                unreadable.append(printable(str(error)))
                continue
            rows.append((record.started_at, row(id, run, record)))
        rows.sort(key=lambda one: one[0], reverse=True)
        return {"schema": SCHEMA, "runs": [shown for _, shown in rows[:MAX_RUNS]], "unreadable": unreadable}


def _record(run: ObservedRun) -> RunRecord:
    """Return the record with the step time of every command, but a training run's own figure. Raises UserError."""
    record = run.any_record()
    if record.status == "running" or not isinstance(record, TrainedRun):
        return record
    return with_measured_step(run, record)


def row(id: str, run: ObservedRun, record: RunRecord) -> dict[str, Any]:
    return {
        "id": id, **label_json(run, record.name), **_state(run, record),
        "val_loss": "–" if record.val_loss is None else format_value(record.val_loss, "digits4"),
        "started": _minute(record.started_at), "gpu": printable(record.device_name),
    }  # fmt: skip


def _minute(moment: str) -> str:
    return isolated(printable(moment.replace("T", " ")[:16]))


def _state(run: ObservedRun, record: RunRecord) -> dict[str, Any]:
    """Where it stands, and how fast it was; a running one's record lags behind its metrics."""
    trained = isinstance(record, TrainedRun)
    last = newest(run.path / "metrics.jsonl") if record.status == "running" else None
    steps = max(record.steps_done, last["step"] + trained) if last else record.steps_done
    of = record.steps_asked or steps
    return {
        "status": record.status, "status_text": runs_view.status_text(run, record).text(),
        "tone": runs_view.STATUS_TONES.get(record.status, "plain"), "steps": steps,
        "of": of, "steps_text": isolated(f"{steps:,} / {of:,}"), "progress": progress(steps, of),
        "speed": say("value.throughput", tokens_per_s=record.tokens_per_s) if record.tokens_per_s else "",
        "mfu": format_value(record.mfu, "percent") if trained and record.mfu else "",
    }  # fmt: skip


def page(id: str, run: ObservedRun, curve: Curve) -> dict[str, Any]:
    """One run: how it goes, and where to go on reading. Raises UserError."""
    record = _record(run)
    return {"schema": SCHEMA, **row(id, run, record), **_now(run, record, curve)}


def report(run: ObservedRun) -> dict[str, Any]:
    """What `foretrain report` makes of a run, or why there is none in `problem`. It takes seconds of a long one."""
    try:
        document = making.run(run)
    except (UserError, OSError) as error:  # damaged, or gone while it was read
        return {"schema": SCHEMA, "document": None, "problem": printable(str(error))}
    return {"schema": SCHEMA, "document": document_json(document), "problem": ""}


def live_answer(run: ObservedRun, curve: Curve, seen_bytes: int) -> dict[str, Any]:
    """How a run goes since `seen_bytes` of its metrics, as `next` of an earlier answer gave it. Raises UserError."""
    record = _record(run)
    return {"schema": SCHEMA, **_state(run, record), **_now(run, record, curve, seen_bytes)}


def _now(run: ObservedRun, record: RunRecord, curve: Curve, seen_bytes: int = -1) -> dict[str, Any]:
    """Figures, events and pictures, these where the metrics go on after `seen_bytes`; `next` is how far they go."""
    if isinstance(record, TrainedRun):
        lines = curve.lines()
        end_bytes = curve.end_bytes
    else:
        end_bytes = size_of(run.path / "metrics.jsonl")
        lines = _as_steps(run.read_lines("metrics", whole=False))
    drawn = None if end_bytes == seen_bytes else [block_json(one) for one in pictures(lines)]
    now = block_json(figures(record, lines))["items"]
    return {"now": now, "pictures": drawn, "next": end_bytes, "events": _events(run)}


def _as_steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of a Trainer as foretrain's own runs have them: a step counts from 0, and a log line tells of its step."""
    found: dict[int, dict[str, Any]] = {}
    others = []
    for line in lines:
        if line["kind"] in ("step", "log"):
            here = found.setdefault(line["step"] - 1, {"kind": "step", "step": line["step"] - 1})
            here.update({key: value for key, value in line.items() if key not in ("kind", "step")})
        else:
            others.append(line)
    return [found[step] for step in sorted(found)] + others


def _events(run: ObservedRun) -> list[dict[str, str]]:
    found = []
    for line in run.read_lines("events")[-MAX_EVENTS:]:
        id, values = str(line.get("id", ""))[:80], line.get("values")
        try:
            text = say(f"event.{id}", **values) if has(f"event.{id}") and isinstance(values, dict) else id
        except (KeyError, ValueError, TypeError):
            text = id
        at = isolated(printable(str(line.get("at", "")).replace("T", " ")[:19]))
        found.append({"at": at, "text": printable(text)[:2000]})
    return found


def comparisons(runs: Runs) -> dict[str, Any]:
    rows = []
    for id, run in list(runs.all().items())[:MAX_RUNS]:
        try:
            name, found, source = _check(run)
        except UserError:
            continue
        if found:
            named = {"id": id, "name": printable(name), "path": printable(str(run.path))}
            rows.append({**named, "rows": [_comparison_row(row) for row in found], "source": source})
    return {"schema": SCHEMA, "runs": rows}


def _check(run: ObservedRun) -> tuple[str, list[Row], str]:
    if source_of(run.path) == "trained":
        record, _, check = of_directory(run)
        return record.name, [row for row in check.rows if row.id in _COMPARED], check.predicted_source
    found = explain_directory(run)
    steady = next((piece for piece in found.phases if piece.id == "steady_step"), None)
    pieces: list[tuple[str, Literal["bytes", "seconds"], float | None, float | None]] = []
    if steady:
        pieces.append(("phase.steady_step", "bytes", steady.predicted_bytes, steady.measured_bytes))
    if found.step:
        pieces.append(("time.step", "seconds", found.step.predicted_s, found.step.measured_s))
    rows = [
        Row(id=id, kind=kind, predicted=predicted, measured=measured)
        for id, kind, predicted, measured in pieces
        if predicted and measured
    ]
    plan = found.forecast
    return found.record.name, rows if plan else [], plan.memory.source if plan else ""


def _comparison_row(row: Row) -> dict[str, Any]:
    unit = "bytes" if row.kind == "bytes" else "duration"
    inside = "" if row.in_range is None else say("page.inside" if row.in_range else "page.outside")
    return {
        "label": Message(f"quantity.{row.id}").text(), "predicted": format_value(row.predicted, unit),
        "measured": format_value(row.measured, unit), "error": format_value(row.error, "signed_percent"),
        "range": say("page.busy") if row.busy else inside,
    }  # fmt: skip
