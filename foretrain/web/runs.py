"""The runs in the folders that the page was given: their list, one run with its forecast, what is new in a live one."""

import hashlib
from pathlib import Path
from typing import Any

from foretrain.analysis.forecast_check import ForecastCheck, Row, of_directory
from foretrain.analysis.measured_step import with_measured_step
from foretrain.app import run_report
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, has, printable, say
from foretrain.reports.document import Message
from foretrain.reports.views import run as run_view
from foretrain.reports.views import run_explain
from foretrain.training.store import RunRecord, find_runs
from foretrain.web.answers import SCHEMA, document_json
from foretrain.web.observe import ObservedRun, curve, newest, tail

MAX_RUNS = 300
MAX_EVENTS = 200


class Runs:
    """Runs by id. An id is looked up among those that are there; it is never part of a path."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = roots

    def all(self) -> dict[str, ObservedRun]:
        """Every run whose folder lies in one of the roots and is no link, by id."""
        found = {}
        inside = [root.resolve() for root in self._roots]
        for directory in find_runs(self._roots):
            run, path = ObservedRun(directory.path), directory.path.resolve()
            if run.is_plain() and any(path.is_relative_to(root) for root in inside):
                found[hashlib.sha256(str(path).encode("utf-8", "replace")).hexdigest()[:16]] = run
        return found

    def get(self, id: str) -> ObservedRun | None:
        return self.all().get(id)

    def listed(self) -> dict[str, Any]:
        """Every run in a row, the newest first; what cannot be read is said."""
        rows, unreadable = [], []
        for id, run in self.all().items():
            try:
                record = _record(run)
            except UserError as error:
                unreadable.append(printable(str(error)))
                continue
            rows.append(row(id, run, record))
        rows.sort(key=lambda one: one["started"], reverse=True)
        return {"schema": SCHEMA, "runs": rows[:MAX_RUNS], "unreadable": unreadable}


def _record(run: ObservedRun) -> RunRecord:
    """The record of a run with the time of its step as every command has it; while it trains, its own figure, as its
    metrics would be read anew at every look. Raises UserError."""
    record = run.read_record()
    return record if record.status == "running" else with_measured_step(run, record)


def row(id: str, run: ObservedRun, record: RunRecord) -> dict[str, Any]:
    """One run as the list has it."""
    return {
        "id": id, "name": printable(record.name), "path": printable(str(run.path)), **_state(run, record),
        "of": record.config.max_iters, "val_loss": record.val_loss, "started": record.started_at,
        "params": record.n_params, "gpu": printable(record.gpu.name),
    }  # fmt: skip


def _state(run: ObservedRun, record: RunRecord) -> dict[str, Any]:
    """Where it stands, and how fast it was; a running one's record lags behind its metrics."""
    tone = run_view.STATUS_TONES.get(record.status, "plain")
    last = newest(run.path / "metrics.jsonl") if record.status == "running" else None
    steps = max(record.steps_done, last["step"] + 1) if last else record.steps_done
    return {
        "status": record.status, "status_text": run_view.status_text(run, record).text(), "tone": tone, "steps": steps,
        "step": format_value(record.step_s, "duration") if record.step_s else "",
        "speed": say("value.throughput", tokens_per_s=record.tokens_per_s) if record.tokens_per_s else "",
        "mfu": format_value(record.mfu, "percent") if record.mfu else "",
    }  # fmt: skip


def page(id: str, run: ObservedRun) -> dict[str, Any]:
    """One run: what `foretrain report` makes of it, its curve, and where to go on reading. Raises UserError."""
    record = _record(run)
    metrics, end = curve(run.path / "metrics.jsonl")
    answer = {"schema": SCHEMA, **row(id, run, record), "metrics": metrics, "next": end, "events": _events(run)}
    try:
        document = run_explain.report(run_report.gather(run))
    except UserError as error:
        return {**answer, "document": None, "problem": printable(str(error))}
    return {**answer, "document": document_json(document), "problem": ""}


def live(run: ObservedRun, start: int) -> dict[str, Any]:
    """What is new since a place in metrics.jsonl. Raises UserError."""
    record = _record(run)
    lines, end, anew = tail(run.path / "metrics.jsonl", start)
    return {"schema": SCHEMA, **_state(run, record), "of": record.config.max_iters, "metrics": lines, "next": end,
            "anew": anew, "events": _events(run)}  # fmt: skip


def _events(run: ObservedRun) -> list[dict[str, str]]:
    """What happened, in words; of an event that this version has no words for, its id."""
    found = []
    for line in run.read_lines("events")[-MAX_EVENTS:]:
        id, values = str(line.get("id", ""))[:80], line.get("values")
        try:
            text = say(f"event.{id}", **values) if has(f"event.{id}") and isinstance(values, dict) else id
        except (KeyError, ValueError, TypeError):
            text = id
        found.append({"at": printable(str(line.get("at", "")))[:40], "text": printable(text)[:2000]})
    return found


def comparisons(runs: Runs) -> dict[str, Any]:
    """Predicted against measured of every run that has measured something: a step's time, and the memory."""
    rows = []
    for id, run in list(runs.all().items())[:MAX_RUNS]:
        try:
            record, _, found = of_directory(run)
        except UserError:
            continue
        picked = _picked(found)
        if picked:
            named = {"id": id, "name": printable(record.name), "path": printable(str(run.path))}
            rows.append({**named, "rows": picked, "source": found.predicted_source})
    return {"schema": SCHEMA, "runs": rows}


def _picked(comparison: ForecastCheck) -> list[dict[str, Any]]:
    wanted = ("time.step", "process.reserved", "process.resident", "phase.steady_step", "time.run")
    return [_comparison_row(row) for row in comparison.rows if row.id in wanted]


def _comparison_row(row: Row) -> dict[str, Any]:
    unit = "bytes" if row.kind == "bytes" else "duration"
    return {
        "label": Message(f"quantity.{row.id}").text(), "kind": row.kind, "predicted": row.predicted,
        "measured": row.measured, "predicted_text": format_value(row.predicted, unit),
        "measured_text": format_value(row.measured, unit), "error": format_value(row.error, "signed_percent"),
        "in_range": row.in_range, "busy": row.busy,
    }  # fmt: skip
