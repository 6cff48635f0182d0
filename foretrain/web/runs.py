"""The runs in the folders that the page was given: their list, one run with its forecast, what is new in a live one."""

import hashlib
from pathlib import Path
from typing import Any, Literal

from foretrain.analysis.forecast_check import Row, of_directory
from foretrain.analysis.measured_step import with_measured_step
from foretrain.analysis.run import explain_directory
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, has, isolated, printable, say
from foretrain.reports import making
from foretrain.reports.document import Message
from foretrain.reports.html import block_json, document_json
from foretrain.reports.views import runs as runs_view
from foretrain.runs.folder import find_runs
from foretrain.runs.record import RunRecord, TrainedRun, source_of
from foretrain.web import observe
from foretrain.web.answers import SCHEMA
from foretrain.web.observe import Curve, ObservedRun, newest, said_of

MAX_RUNS = 300
MAX_EVENTS = 200
MAX_CURVES = 8
_SHOWN = ("time.step", "process.reserved", "process.resident", "phase.steady_step", "time.run")  # rows of a comparison


class Runs:
    """Runs by id. An id is looked up among those that are there; it is never part of a path."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = roots
        self._curves: dict[str, Curve] = {}  # of those that somebody looks at, the newest last

    def curve(self, id: str, run: ObservedRun) -> Curve:
        """What is known of a run's metrics; it is read on, not anew."""
        found = self._curves.pop(id, None) or Curve(run.path / "metrics.jsonl")
        self._curves = dict([*list(self._curves.items())[1 - MAX_CURVES :], (id, found)])
        return found

    def all(self) -> dict[str, ObservedRun]:
        """Every run whose folder lies in one of the roots and is no link, by id."""
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
        "id": id, **said_of(run, record.name), **_state(run, record),
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
        "of": of, "steps_text": isolated(f"{steps:,} / {of:,}"), "progress": observe.progress(steps, of),
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
        end_bytes = observe.size_of(run.path / "metrics.jsonl")
        lines = _as_steps(run.read_lines("metrics", whole=False))
    drawn = None if end_bytes == seen_bytes else [block_json(one) for one in observe.pictures(lines)]
    figures = block_json(observe.figures(record, lines))["items"]
    return {"now": figures, "pictures": drawn, "next": end_bytes, "events": _events(run)}


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
    """Predicted against measured of every run that has measured something: a step's time, and the memory."""
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
        return record.name, [row for row in check.rows if row.id in _SHOWN], check.predicted_source
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
