"""A tracked run, or its export, as a subject: losses, and speed from a column or the time stamps."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.analysis.log_analysis import of_tracked
from foretrain.analysis.measured_step import steady_times
from foretrain.base.errors import UserError
from foretrain.comparison import settings
from foretrain.comparison.sources.plans import bytes_per_token, with_forecast, with_vocabulary
from foretrain.comparison.sources.request import SourceRequest, card_named
from foretrain.comparison.sources.table_file import Table, Value, read_table, wide
from foretrain.comparison.subject import Curve, Subject, curve, exact
from foretrain.predict.plan import Note
from foretrain.runs import trackers
from foretrain.runs.columns import LOSSES, NAMES, column_of, counts_of
from foretrain.runs.formats.figures import loss_unit
from foretrain.runs.record import folder_of, source_of
from foretrain.runs.trackers.tracker import Row, Tracked, without_undone


def claims(path: Path, head: bytes) -> bool:
    if any(word in head for word in (b'"log_history"', b'"current_steps"', b"global_step/max_steps")):
        return False
    return path.suffix in (".csv", ".tsv", ".json", ".jsonl", ".ndjson") or head.lstrip()[:2] in (b'{"', b"[{", b"[[")


def load(given: SourceRequest) -> Subject:
    """Load the table, or several of one run (TensorBoard downloads each curve by itself). Raises UserError."""
    roles: dict[str, dict[int, float]] = {}
    names: set[str] = set()
    for path in (Path(given.path), *given.tables):
        table = read_table(path, given.own.get("run"))
        names |= table.columns.keys()
        for role, values in by_step(table, path, given.columns).items():
            roles.setdefault(role, {}).update(values)
    if not any(roles.get(role) for role in LOSSES):
        raise UserError("data.table_no_losses", path=given.path)
    return subject_of(given, roles, names)


def by_step(table: Table, path: Path, chosen: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """Return {role: {step: value}}; a role's column is the user's choice, else the first existing of NAMES."""
    counts = {name: sum(value is not None for value in values) for name, values in table.columns.items()}
    columns = {role: name for role in NAMES if (name := column_of(role, counts, chosen))}
    if "Value" in table.columns and not any(role in columns for role in LOSSES):
        role = _role_of_file(path)
        columns |= {role: "Value"} if role else {}
    if "step" not in columns or not any(role in columns for role in (*LOSSES, "step_s", "step_ms", "tokens_per_s")):
        lacks = "step" if "step" not in columns else "loss"
        raise UserError("data.table_no_column", path=str(path), lacks=lacks, columns=list(table.columns)[:12])
    steps = table.columns[columns["step"]]
    return {role: _values(steps, table.columns[name]) for role, name in columns.items() if role != "step"}


def _role_of_file(path: Path) -> str | None:
    """Read the tag in TensorBoard's name of a download: run-NAME-tag-train_loss.csv."""
    name = path.stem.lower()
    tag = name.rpartition("tag-")[2]
    if "loss" not in tag:
        return None
    return "val_loss" if any(word in tag for word in ("val", "eval", "test")) else "train_loss"


def _values(steps: list[Value], values: list[Value]) -> dict[int, float]:
    """Return {step: value}; the last value of a repeated step counts."""
    pairs = zip(steps, values, strict=True)
    return {int(step): value for step, value in pairs if step is not None and 0 <= step < 1e15 and value is not None}


def subject_of(given: SourceRequest, roles: dict[str, dict[int, float]], names: Iterable[str]) -> Subject:
    """Return a run by its figures. `names`: of all columns, which tell what the loss is."""
    seconds = seconds_of(roles)
    tokens, stated = _tokens_per_step(roles), given.number("tokens_per_step", 1, 10**13)
    times, since = _times(roles, seconds)
    bpb = not roles.get("val_loss") and bool(roles.get("val_bpb"))
    unit = loss_unit(names) or "nats a token"
    resolved = given.resolved
    config = with_vocabulary(resolved, None) if resolved else None
    per_step = int(stated) if stated else tokens
    known: dict[str, Any] = {"tokens_per_step": per_step} if per_step else {}
    gpu = given.card
    subject = Subject(
        label=given.name, path=given.path, kind="table", settings=known | settings.of_gpu(gpu), gpu=gpu,
        tokens_per_step=per_step, bytes_per_token=bytes_per_token(given, config), step_times_s=times,
        steps_since_start=since, step_s=exact(median(times)) if times else None,
        step_source="measured" if times else None, used_by_others_bytes=given.held_bytes,
        train=_curve(roles.get("train_loss", {}), seconds),
        val=_curve(roles.get("val_bpb" if bpb else "val_loss", {}), seconds),
        val_unit="bits a byte" if bpb else unit, train_unit=unit, notes=_notes(roles),
        wall_s=max(seconds.values(), default=None), diverged=_diverged(roles),
    )  # fmt: skip
    return with_forecast(subject, config, gpu, resolved.step) if config and resolved else subject


def seconds_of(roles: dict[str, dict[int, float]]) -> dict[int, float]:
    """Return the seconds since the first record; some programs stamp in milliseconds."""
    if roles.get("seconds"):
        return roles["seconds"]
    stamps = {step: s for step, s in roles.get("timestamp", {}).items() if math.isfinite(s)}
    if not stamps:
        return {}
    first = min(stamps.values())
    unit = 1e-3 if first > 1e11 else 1.0
    return {step: (stamp - first) * unit for step, stamp in stamps.items()}


def _tokens_per_step(roles: dict[str, dict[int, float]]) -> int | None:
    seen = sorted(roles.get("tokens", {}).items())
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(seen) if b[0] > a[0]]
    middle = median(steps) if steps else 0.0
    return round(middle) if 1 <= middle < 1e13 else None


def _times(roles: dict[str, dict[int, float]], seconds: dict[int, float]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return steady step times, and each one's step after the first: as logged, else from tokens/s or time stamps."""
    column = roles.get("step_s") or {step: ms / 1e3 for step, ms in roles.get("step_ms", {}).items()}
    tokens = _tokens_per_step(roles)
    if not column and tokens and roles.get("tokens_per_s"):
        column = {step: tokens / rate for step, rate in roles["tokens_per_s"].items() if rate > 0}
    if not column:
        marks = sorted(seconds.items())
        column = {b[0]: (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks)}
    numbers = sorted(column)
    times = [column[number] for number in numbers]
    return steady_times(numbers, times)


def _curve(losses: dict[int, float], seconds: dict[int, float]) -> Curve:
    return curve([(step, losses[step], seconds.get(step)) for step in sorted(losses)])


def _diverged(roles: dict[str, dict[int, float]]) -> bool:
    return any(not math.isfinite(column[max(column)]) for role in LOSSES if (column := roles.get(role)))


def _notes(roles: dict[str, dict[int, float]]) -> tuple[Note, ...]:
    lost = [step for role in LOSSES for step, loss in roles.get(role, {}).items() if not math.isfinite(loss)]
    return (Note(id="not_finite", values={"count": len(lost), "first": min(lost)}),) if lost else ()


def is_tracked(path: Path, head: bytes) -> bool:
    """Claim a tracker's files; a run's own directory tells more. Raises UserError for damage."""
    return source_of(folder_of(path)) is None and trackers.keeper_of(path) is not None


def load_tracked(given: SourceRequest) -> Subject:
    path = Path(given.path)
    kept = trackers.read(path, given.own.get("run"))
    step = column_of("step", counts_of(kept.rows), given.columns)
    rows = [_with_one_step(row, step) for row in without_undone(kept.rows, step)] if step else kept.rows
    table = wide(rows, path)
    roles = by_step(table, path, given.columns)
    if not any(roles.get(role) for role in LOSSES):
        raise UserError("data.table_no_losses", path=given.path)
    given = given if given.label else replace(given, label=kept.name)
    return _with_config(subject_of(given, roles, table.columns), given, kept)


def _with_one_step(row: Row, step: str) -> Row:
    """Keep only this step: a tracker counts its calls beside the run's own steps."""
    return {"step": row[step]} | {name: value for name, value in row.items() if name not in NAMES["step"]}


def _with_config(subject: Subject, given: SourceRequest, kept: Tracked) -> Subject:
    config = of_tracked(kept) if given.resolved is None else None
    if config is None:
        return subject
    gpu = given.card or card_named(kept.config.get("gpu") and str(kept.config["gpu"]))
    tokens = given.number("tokens_per_step", 1, 10**13)
    subject = replace(subject, gpu=gpu, tokens_per_step=int(tokens) if tokens else config.tokens_per_step)
    return with_forecast(subject, config, gpu, "foretrain" if kept.is_ours else "nanogpt")
