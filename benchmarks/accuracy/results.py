"""benchmarks/results/accuracy.json: the stored predictions, and their record. No torch."""

import ast
import hashlib
import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accuracy.table import KINDS, Case, Figure, Table

PROGRAMS = Path(__file__).parent / "programs"
TEXTS = ("fingerprint", "foretrain", "commit", "torch", "python", "date")


@cache
def _driver(program: str) -> str:
    path = PROGRAMS / f"{program}.py"
    return ast.dump(ast.parse(path.read_text("utf-8"))) if path.is_file() else ""


def fingerprint(case: Case) -> str:
    """Hash what decides a prediction: settings, card, driver; not what was measured."""
    asked = [case.program, dict(case.settings), case.gpu, list(case.checkouts), sorted(f.reads for f in case.figures)]
    return hashlib.sha256((json.dumps(asked, sort_keys=True) + _driver(case.program)).encode()).hexdigest()[:16]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the kept predictions by case; none where there is no file."""
    return json.loads(path.read_text("utf-8"))["predictions"] if path.exists() else {}


def write(path: Path, document: dict[str, Any]) -> None:
    """Write all or nothing: a stop in the middle leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.new")
    staging.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    staging.replace(path)


def group_of(case: Case) -> str:
    if case.program == "plan":
        return "plan"
    if case.program == "single_ops":
        return "single operations"
    return "programs, compiled" if case.settings.get("traced_compiled") else "programs, eager"


def figure_row(figure: Figure, predicted: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figure with its prediction; a positive error is too much, or too slow."""
    row: dict[str, Any] = {
        "id": figure.id, "kind": figure.kind, "measured": figure.value, "published": f"{figure.measured:,} {figure.unit}",
        "quote": figure.quote, "named": figure.named,
    }  # fmt: skip
    answer = None if predicted is None else predicted.get(figure.reads)
    if answer is None:
        return row
    if KINDS[figure.kind] == "fits":
        return row | {"predicted": answer, "right": answer is False}
    if isinstance(answer, dict):
        row |= {"low": answer["low"], "high": answer["high"], "inside": answer["low"] <= figure.value <= answer["high"]}
        answer = answer["expected"]
    if KINDS[figure.kind] == "memory":
        row["same"] = figure.same(answer)
    if figure.kind == "tokens/s":  # the error is one of time, as it is of step times
        return row | {"predicted": answer, "error": figure.value / answer - 1}
    return row | {"predicted": answer, "error": answer / figure.value - 1}


def case_row(case: Case, kept: dict[str, Any] | None, state: str) -> dict[str, Any]:
    """Return the case with its figures. `state`: why it has none."""
    predicted = kept["said"] if kept else None
    row: dict[str, Any] = {
        "id": case.id, "group": group_of(case), "what": case.what, "gpu": case.gpu, "measured_on": case.measured_on,
        "measured_torch": case.torch, "grade": case.grade, "source": case.source, "assumed": case.assumed,
        "state": "predicted" if kept else state,
        "figures": [figure_row(figure, predicted) for figure in case.figures],
    }  # fmt: skip
    if kept:
        row["with"] = {key: kept[key] for key in TEXTS if key != "fingerprint"}
        row["notes"] = kept["said"].get("notes", [])
    return row


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    memory = [
        (row, figure)
        for row in rows
        for figure in row["figures"]
        if KINDS[figure["kind"]] == "memory" and "error" in figure
    ]
    programs = [pair for pair in memory if pair[0]["group"].startswith("programs")]
    sure = ("A", "A-")
    groups = {
        "all memory figures": memory,
        "… of whole programs": programs,
        "…… eager": [pair for pair in programs if pair[0]["group"] == "programs, eager"],
        "…… compiled": [pair for pair in programs if pair[0]["group"] == "programs, compiled"],
        "…… peak allocated or requested": [p for p in programs if p[1]["kind"] in ("allocated", "requested")],
        "…… reserved": [pair for pair in programs if pair[1]["kind"] == "reserved"],
        "…… between steps": [pair for pair in programs if pair[1]["kind"] == "at rest"],
        "…… without a named difference": [pair for pair in programs if not pair[1]["named"]],
        "… of single operations": [pair for pair in memory if pair[0]["group"] == "single operations"],
        "… with the configuration all sure (A, A-)": [pair for pair in memory if pair[0]["grade"] in sure],
    }
    return [_group(name, [figure for _, figure in found]) for name, found in groups.items() if found]


def _group(name: str, figures: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = sorted(abs(figure["error"]) for figure in figures)
    return {
        "group": name,
        "figures": len(sizes),
        "median_abs_error": median(sizes),
        "p90_abs_error": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "worst_abs_error": sizes[-1],
        "same": sum(figure["same"] for figure in figures),
        "within_half_percent": sum(size <= 0.005 for size in sizes),
        "within_3_percent": sum(size <= 0.03 for size in sizes),
    }


def _of_kind(rows: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [f for row in rows for f in row["figures"] if KINDS[f["kind"]] == kind and "predicted" in f]


def document(
    table: Table, kept: dict[str, dict[str, Any]], states: dict[str, str], head: dict[str, Any]
) -> dict[str, Any]:
    """Return the record: cases in the table's order, then what is left out, then the predictions."""
    rows = [case_row(case, kept.get(case.id), states.get(case.id, "not asked for yet")) for case in table.cases]
    times, fits = _of_kind(rows, "time"), _of_kind(rows, "fits")
    figures = sum(len(case.figures) for case in table.cases)
    return {
        **head,
        "collected": table.collected,
        "figures": figures,
        "predicted": sum("predicted" in figure for row in rows for figure in row["figures"]),
        "summary": summary_of(rows),
        "time": {
            "figures": len(times),
            "median_abs_error": median(abs(f["error"]) for f in times) if times else None,
            "inside": sum(f["inside"] for f in times),
        },
        "fits": {"figures": len(fits), "right": sum(f["right"] for f in fits)},
        "cases": rows,
        "left_out": [row.model_dump() for row in table.left_out],
        "predictions": kept,
    }
