"""Trainers' runs with ForetrainCallback on the page: in the list of runs, one as it goes, and its report."""

from typing import Any

from foretrain.analysis.trainer_run import TrainerRunExplanation, explain_directory
from foretrain.base.messages import format_value, isolated, printable, say
from foretrain.comparison.sources import load
from foretrain.comparison.sources.given import Given
from foretrain.comparison.subject import Subject
from foretrain.reports import measured
from foretrain.reports.as_json import block_json, document_json
from foretrain.reports.document import Message
from foretrain.runs.record import TrainerRun, source_of
from foretrain.web import observe
from foretrain.web.observe import ObservedRun, said_of

TONES = {"finished": "good", "failed": "bad", "killed": "bad", "stopped": "warn"}


def row(id: str, run: ObservedRun) -> tuple[str, dict[str, Any]]:
    """(when it began, the run as the list has it). Raises UserError."""
    record = run.record_of(TrainerRun)
    started = isolated(printable(record.started_at.replace("T", " ")[:16]))
    shown = {
        "id": id, **said_of(run, record.name), **_state(run),
        "val_loss": "–" if record.val_loss is None else format_value(record.val_loss, "digits4"),
        "started": started, "gpu": printable(record.device),
    }  # fmt: skip
    return record.started_at, shown


def beside(id: str, run: ObservedRun) -> tuple[dict[str, Any], Subject]:
    """(the run as the list has it, what is compared of it). Raises UserError."""
    shown = row(id, run)[1]
    return shown, load(Given(path=str(run.path), label=shown["name"]))


def _state(run: ObservedRun) -> dict[str, Any]:
    record = run.record_of(TrainerRun)
    steps = max(record.steps_done, _last_step(run)) if record.status == "running" else record.steps_done
    of = record.max_steps or steps
    return {
        "status": record.status, "status_text": Message(f"callback.status.{record.status}").text(),
        "tone": TONES.get(record.status, "plain"), "steps": steps, "of": of,
        "steps_text": isolated(f"{steps:,} / {of:,}"), "progress": observe.progress(steps, of),
        "speed": say("value.throughput", tokens_per_s=record.tokens_per_s) if record.tokens_per_s else "", "mfu": "",
    }  # fmt: skip


def _last_step(run: ObservedRun) -> int:
    return max((line["step"] for line in run.read_lines("metrics", whole=False) if line["kind"] == "step"), default=0)


def page(id: str, run: ObservedRun, events: list[dict[str, str]], seen_bytes: int = -1) -> dict[str, Any]:
    """One run: how it goes since `seen_bytes` of its metrics. Raises UserError."""
    record = run.record_of(TrainerRun)
    try:
        size = (run.path / "metrics.jsonl").stat().st_size
    except OSError:
        size = 0
    lines = _as_steps(run.read_lines("metrics", whole=False))
    known = {"step_s": record.step_s, "tokens_per_s": record.tokens_per_s} if record.status != "running" else {}
    now = block_json(observe.figures_of(known if record.step_s else {}, lines, running=record.status == "running"))
    drawn = None if size == seen_bytes else [block_json(one) for one in observe.pictures(lines)]
    return {**row(id, run)[1], "now": now["items"], "pictures": drawn, "next": size, "events": events}


def _as_steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines in the form of foretrain's own runs: a step counts from 0, and a log line tells of its step."""
    found: dict[int, dict[str, Any]] = {}
    others = []
    for line in lines:
        if line["kind"] in ("step", "log"):
            here = found.setdefault(line["step"] - 1, {"kind": "step", "step": line["step"] - 1})
            here.update({key: value for key, value in line.items() if key not in ("kind", "step")})
        else:
            others.append(line)
    return [found[step] for step in sorted(found)] + others


def report(run: ObservedRun) -> dict[str, Any]:
    """What `foretrain report` makes of it. Raises UserError and OSError."""
    return document_json(measured.trainer_run(run))


def against_forecast(run: ObservedRun) -> dict[str, Any] | None:
    """Forecast beside measurement, as the page has it of all runs; None where there is none. Raises UserError."""
    found = explain_directory(run)
    rows = _rows(found)
    if found.forecast is None or not rows:
        return None
    return {"name": printable(found.record.name), "rows": rows, "source": found.forecast.memory.source}


def _rows(found: TrainerRunExplanation) -> list[dict[str, Any]]:
    rows = [
        _row(Message("quantity.phase.steady_step"), piece.predicted_bytes, piece.measured_bytes, "bytes")
        for piece in found.phases
        if piece.id == "steady_step" and piece.predicted_bytes and piece.measured_bytes
    ]
    step = found.step
    if step is not None and step.predicted_s and step.measured_s:
        rows.append(_row(Message("quantity.time.step"), step.predicted_s, step.measured_s, "duration"))
    return rows


def _row(label: Message, predicted: float, measured: float, unit: str) -> dict[str, Any]:
    return {
        "label": label.text(), "predicted": format_value(predicted, unit), "measured": format_value(measured, unit),
        "error": format_value(predicted / measured - 1, "signed_percent"), "range": "",
    }  # fmt: skip


def is_one(run: ObservedRun) -> bool:
    return source_of(run.path) == "trainer"
