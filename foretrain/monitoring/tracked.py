"""A run that a tracker has kept, as a training log: its steps and evaluations, and what its config says."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.options import OPTIONS
from foretrain.monitoring.columns import column_of, counts_of
from foretrain.monitoring.formats.tracked import OTHERS, OURS
from foretrain.monitoring.training_log import TrainingLog, parse_log
from foretrain.training.trackers.tracker import OF_STEP, Row, Tracked, logged_at_s, without_undone

_RATES = ("train/learning_rate", "learning_rate", "lr")


def log_of(tracked: Tracked, path: Path) -> TrainingLog:
    """The log. Raises UserError where there is no training loss in it."""
    columns = counts_of(tracked.rows)
    named = {role: column_of(role, columns) for role in ("step", "train_loss", "val_loss", "step_s", "tokens_per_s")}
    if named["step"] is None or named["train_loss"] is None:
        lacks = "step" if named["step"] is None else "loss"
        raise UserError("data.table_no_column", path=str(path), lacks=lacks, columns=sorted(columns)[:12])
    rows = without_undone(tracked.rows, named["step"])
    log = parse_log(_lines(tracked, rows, {role: name for role, name in named.items() if name}), str(path))
    if not tracked.is_ours:
        return log
    settings = {key: value for key, value in tracked.config.items() if key in OPTIONS}
    return replace(log, header=log.header.model_copy(update={"settings": settings}))


def _lines(tracked: Tracked, rows: list[Row], named: dict[str, str]) -> Iterator[str]:
    """As formats/tracked.py reads them."""
    marker = OURS if tracked.is_ours else OTHERS
    yield json.dumps({"tracked": marker, "run": _run(tracked, rows)})
    names = {key: named[key] for key in ("step_s", "tokens_per_s") if key in named}
    names["learning_rate"] = next((name for name in _RATES if any(name in row for row in rows)), "")
    before: tuple[int, float] | None = None
    for row in rows:
        step = int(row[named["step"]])
        found: dict[str, Any] = {"tracked": marker, "step": step}
        if (lost := _number(row, named.get("val_loss", ""))) is not None:
            yield json.dumps({**found, "val_loss": lost})
        if (loss := _number(row, named["train_loss"])) is None:
            continue
        found["loss"] = loss
        for key, name in names.items():
            if (value := _number(row, name)) is not None:
                found[key] = value
        at_s = logged_at_s(row)
        if "step_s" not in found and at_s is not None:
            if before and step > before[0] and at_s > before[1]:
                found["step_s"] = (at_s - before[1]) / (step - before[0])
            before = step, at_s
        yield json.dumps(found)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    try:
        return float(value) if isinstance(value, int | float | str) else None  # trackio keeps NaN as a text
    except ValueError:
        return None


def _run(tracked: Tracked, rows: list[Row]) -> dict[str, float]:
    """Fields of LogHeader, of a run of ours: tokens of a step, and on a card what its allocator kept at most."""
    config = tracked.config
    tokens = config.get("tokens_per_step")
    if not tracked.is_ours or not isinstance(tokens, int | float):
        return {}
    found: dict[str, float] = {"tokens_per_step": int(tokens)}
    held = [value for row in rows if (value := _number(row, OF_STEP["memory_bytes"])) and math.isfinite(value)]
    if held and any(OF_STEP["power_w"] in row for row in rows):  # on a CPU it is the process's
        found["reserved_peak_bytes"] = round(max(held))
    return found
