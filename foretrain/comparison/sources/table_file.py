"""Tables exported by trackers: CSV, TSV, JSON and JSON lines, as columns of numbers or None.

wandb's chart export ("Step", "NAME - train/loss", "…__MIN"); wandb's history ("_step", "_runtime"), trackio's CSV
("step", "timestamp"); TensorBoard's download ("Wall time,Step,Value", or [[wall time, step, value], …]).
"""

import csv
import io
import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.files import JSON_BYTES, read_bytes
from foretrain.base.units import MIB, format_bytes

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
