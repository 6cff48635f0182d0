"""A tracked run, or its export, as a subject: losses, and speed from a column or the time stamps."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.analysis.log_analysis import of_tracked
from foretrain.analysis.measured_step import steady_times
from foretrain.base.errors import UserError
from foretrain.base.files import JSON_BYTES, read_bytes
from foretrain.base.units import MIB, format_bytes
from foretrain.comparison import settings
from foretrain.comparison.sources.plans import bytes_per_token, with_forecast, with_vocabulary
from foretrain.comparison.sources.request import SourceRequest, card_named
from foretrain.comparison.subject import Curve, Subject, curve, exact
from foretrain.predict.plan import Note
from foretrain.runs import trackers
from foretrain.runs.columns import LOSSES, NAMES, column_of, counts_of
from foretrain.runs.formats.figures import loss_unit
from foretrain.runs.record import folder_of, source_of
from foretrain.runs.trackers.tracker import Row, Tracked, without_undone

MAX_BYTES, MAX_JSON_BYTES = 64 * MIB, JSON_BYTES
MAX_CELLS = 4_000_000  # of about 100 bytes each, and five of them for a row
MAX_COLUMNS = 2000
Value = float | None


@dataclass(frozen=True)
class Table:
    columns: dict[str, list[Value]]
    runs: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))


def read_table(path: Path, run: str | None = None) -> Table:
    """Read the table in a file. `run`: one of several. Raises UserError."""
    text = _text(path)
    try:
        if path.suffix in (".json", ".jsonl", ".ndjson") or text.lstrip()[:1] in ("[", "{"):
            rows = _json_rows(text, path)
        else:
            rows = _csv_rows(text, path)
    except csv.Error as error:
        raise UserError("data.table_bad", path=str(path), reason=str(error)) from None
    if not rows:
        raise UserError("data.table_empty", path=str(path))
    return _choose(wide(rows, path), path, run)


def _text(path: Path) -> str:
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise UserError("data.log_unreadable", path=str(path), reason=error.strerror or str(error)) from None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    if b"\x00" in data:
        raise UserError("data.table_binary", path=str(path))
    return data.decode("utf-8-sig", "replace")


def _csv_rows(text: str, path: Path) -> list[dict[str, Any]]:
    while text.startswith("#"):
        text = text.partition("\n")[2]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",")
    names = [name.strip() for name in next(lines, [])]
    if len(names) > MAX_COLUMNS:
        raise UserError("data.table_bad", path=str(path), reason=f"it has {len(names):,} columns")
    rows, cells = [], 0
    for line in lines:
        cells += len(line) + 4
        if cells > MAX_CELLS:
            raise _too_many(path)
        if line:
            rows.append(dict(zip(names, line, strict=False)))
    return rows


def _too_many(path: Path) -> UserError:
    return UserError(
        "data.table_bad", path=str(path), reason=f"it has more than {MAX_CELLS:,} cells; export fewer columns"
    )


def _json_rows(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        if len(text) > MAX_JSON_BYTES and "\n" not in text[:MIB]:
            raise UserError(
                "data.table_bad", path=str(path), reason=f"it is larger than {format_bytes(MAX_JSON_BYTES)}"
            )
        data = json.loads(text)
    except RecursionError:
        raise UserError("data.table_bad", path=str(path), reason="it is nested too deeply") from None
    except ValueError:
        lines = text.splitlines()
        if len(lines) > MAX_CELLS // 5:
            raise _too_many(path) from None
        data = [_record(line) for line in lines if line.strip()]
        data = [record for record in data if record is not None]
        if text.strip() and not data:
            raise UserError("data.table_bad", path=str(path), reason="it is not JSON, nor is any line") from None
    if isinstance(data, dict):
        nested = next((data[key] for key in ("history", "rows") if isinstance(data.get(key), list)), None)
        data = nested if nested is not None else [data]
    if not isinstance(data, list):
        return []
    rows = []
    for row in data:
        if isinstance(row, dict):
            rows.append(row)
        elif isinstance(row, list) and len(row) == 3:
            rows.append(dict(zip(("Wall time", "Step", "Value"), row, strict=True)))
    return rows


def _record(line: str) -> Any:
    """Read one line of JSON lines; a last line that was cut off is left out."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def number(value: Any) -> Value:
    """Return a cell's finite number or NaN; ISO times as seconds; None for others."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 else math.nan
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def wide(rows: list[dict[str, Any]], path: Path) -> Table:
    names = dict.fromkeys(str(name) for row in rows for name in row if name is not None)
    if len(names) > MAX_COLUMNS:
        names = dict.fromkeys(list(names)[:MAX_COLUMNS])
    if (len(names) + 4) * len(rows) > MAX_CELLS:
        raise _too_many(path)
    columns = {name: [number(row.get(name)) for row in rows] for name in names}
    return Table({name: values for name, values in columns.items() if any(v is not None for v in values)})


def _choose(table: Table, path: Path, run: str | None) -> Table:
    """Choose the columns of one run in a chart of several, without wandb's bounds."""
    columns = {
        name: values for name, values in table.columns.items()
        if not name.endswith(("__MIN", "__MAX")) or name.rsplit("__", 1)[0] not in table.columns
    }  # fmt: skip
    names = dict.fromkeys(name.rpartition(" - ")[0] for name in columns if " - " in name)
    if not names:
        return Table(columns)
    if (run is None and len(names) > 1) or (run is not None and run not in names):
        raise UserError("usage.table_runs", path=str(path), runs=list(names)[:8], run=next(iter(names)))
    run = run if run is not None else next(iter(names))
    own = {name.rpartition(" - ")[2]: values for name, values in columns.items() if name.startswith(f"{run} - ")}
    shared = {name: values for name, values in columns.items() if " - " not in name}
    return Table(shared | own, tuple(names))


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
    unit = loss_unit(names) or "nats per token"
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
