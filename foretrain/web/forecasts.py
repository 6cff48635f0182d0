"""Predicted against measured, of every run that the page knows."""

from typing import Any

from foretrain.analysis.forecast_check import ForecastCheck, Row, of_directory
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, printable, say
from foretrain.reports.document import Message
from foretrain.web import trainer_runs
from foretrain.web.answers import SCHEMA
from foretrain.web.runs import MAX_RUNS, Runs


def comparisons(runs: Runs) -> dict[str, Any]:
    """Predicted against measured of every run that has measured something: a step's time, and the memory."""
    rows = []
    for id, run in list(runs.all().items())[:MAX_RUNS]:
        try:
            if trainer_runs.is_one(run):
                told = trainer_runs.against_forecast(run)
                rows += [{"id": id, "path": printable(str(run.path)), **told}] if told else []
                continue
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
    inside = "" if row.in_range is None else say("page.inside" if row.in_range else "page.outside")
    return {
        "label": Message(f"quantity.{row.id}").text(), "predicted": format_value(row.predicted, unit),
        "measured": format_value(row.measured, unit), "error": format_value(row.error, "signed_percent"),
        "range": say("page.busy") if row.busy else inside,
    }  # fmt: skip
