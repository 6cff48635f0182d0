"""Column names of a run's figures in trackers: role -> names, the most certain first."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.options import OPTIONS
from foretrain.runs.formats.records import OTHERS, OURS
from foretrain.runs.trackers.tracker import OF_STEP, Row, Tracked, logged_at_s, without_undone
from foretrain.runs.training_log import TrainingLog, parse_log

# A time is taken only where its unit is known.
NAMES: dict[str, tuple[str, ...]] = {
    "step": (  # wandb's own _step counts calls
        "train/global_step", "trainer/global_step", "iter", "_step", "step", "Step", "iteration", "global_step",
    ),
    "train_loss": (
        "train/loss", "train_loss", "loss", "loss/train", "training_loss", "train/train_loss", "train_loss_step",
        "train/loss_step",
    ),
    "val_loss": (
        "val/loss", "val_loss", "eval/loss", "eval_loss", "valid/loss", "valid_loss", "validation_loss",
        "validation/loss", "loss/val",
    ),
    "val_bpb": ("val/bpb", "val_bpb"),
    "step_s": ("step_s", "step_time_s", "train/dt", "train/step_time_s", "iter_time"),
    "step_ms": ("step_ms", "dt_ms", "step_time_ms", "time_ms", "iter_time_ms"),
    "tokens": ("tokens", "train/tokens", "total_tokens", "num_input_tokens_seen", "train/num_input_tokens_seen"),
    "tokens_per_s": (
        "tokens_per_s", "tokens_per_sec", "tok_per_sec", "train/tok_per_sec", "tokens_per_second",
        "train/tokens_per_second", "train/tokens_per_sec", "throughput/tokens_per_sec",
    ),
    "seconds": ("train/elapsed_s", "_runtime", "total_training_time", "elapsed_s", "Relative Time (Process)"),
    "timestamp": ("_timestamp", "timestamp", "Wall time"),
}  # fmt: skip


LOSSES = ("train_loss", "val_loss", "val_bpb")


def column_of(role: str, columns: Mapping[str, int], chosen: Mapping[str, str] | None = None) -> str | None:
    """Return the column of this role: the chosen one, else the first of NAMES that exists. `columns`: each with its
    number of values; of losses the longest counts, as a mean may have a curve's name."""
    if chosen and chosen.get(role) in columns:
        return chosen[role]
    found = [name for name in NAMES[role] if name in columns]
    return max(found, key=lambda name: columns[name] if role in LOSSES else 0, default=None)


def counts_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return dict(Counter(name for row in rows for name in row))


_RATES = ("train/learning_rate", "learning_rate", "lr")


def log_of(tracked: Tracked, path: Path) -> TrainingLog:
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
    config = tracked.config
    tokens = config.get("tokens_per_step")
    if not tracked.is_ours or not isinstance(tokens, int | float):
        return {}
    found: dict[str, float] = {"tokens_per_step": int(tokens)}
    held = [value for row in rows if (value := _number(row, OF_STEP["memory_bytes"])) and math.isfinite(value)]
    if held and any(OF_STEP["power_w"] in row for row in rows):  # on a CPU it is the process's
        found["reserved_peak_bytes"] = round(max(held))
    return found
