"""MLflow: where MLFLOW_TRACKING_URI says, a server, a SQLite file or a folder; without it where MLflow does by default.

A SQLite file and a folder (`mlruns`, each metric a text of "time value step") are read as they are, without MLflow.
"""

import importlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain.base.safe_read import read_text
from foretrain.config.nanogpt_file import parse_expression
from foretrain.training.trackers import sqlite
from foretrain.training.trackers.tracker import MOST_VALUES, Job, Row, Started, Tracked, Tracker, chosen, damaged

_MOST_AT_ONCE, _MOST_PARAMS, _MOST_OF_A_PARAM = 1000, 100, 6000  # what MLflow takes in one call, and of one value
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}
_MOST_BYTES = 256 * 2**20  # of one metric


class Mlflow(Tracker):
    """Reports to MLflow. What came since the last call is sent at once. A step done again stands twice."""

    name, package, check, project = "mlflow", "mlflow", "`MLFLOW_TRACKING_URI`", "MLFLOW_EXPERIMENT_NAME"

    def start(self, job: Job) -> Started:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        if uri.startswith("file:") or (uri and "://" not in uri):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which the user asked for
        self.mlflow: Any = importlib.import_module("mlflow")
        self.client = self.mlflow.MlflowClient()
        self.waiting: list[Any] = []
        if job.resumed is None:
            found = self.client.get_experiment_by_name(job.project)
            experiment = found.experiment_id if found else self.client.create_experiment(job.project)
            self.run = self.client.create_run(experiment, run_name=job.name)
        else:
            self.run = self.client.get_run(job.resumed)
            self.client.update_run(job.resumed, status="RUNNING")
        self.id: str = self.run.info.run_id
        self._log_config(job.config)
        place = self.client.tracking_uri
        look = place if place.startswith("http") else f"mlflow ui --backend-store-uri {place}"
        return Started(id=self.id, look=look)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        """As parameters; MLflow does not let one change, so a resume adds what is new."""
        known = self.run.data.params
        entity = self.mlflow.entities.Param
        params = [
            entity(key, str(value)[:_MOST_OF_A_PARAM])
            for key, value in config.items()
            if key not in known and str(value)
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self.client.log_batch(self.id, params=params[start : start + _MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        entity, at_ms = self.mlflow.entities.Metric, round(at_s * 1e3)
        self.waiting += [entity(key, value, at_ms, step) for key, value in values.items()]
        if len(self.waiting) >= _MOST_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        while self.waiting:
            self.client.log_batch(self.id, metrics=self.waiting[:_MOST_AT_ONCE])
            del self.waiting[:_MOST_AT_ONCE]

    def finish(self, status: str) -> None:
        self.flush()
        self.client.set_terminated(self.id, _STATUS.get(status, "FAILED"), round(time.time() * 1e3))

    @classmethod
    def claims(cls, path: Path, head: bytes) -> bool:
        if sqlite.has(path, head, "metrics", ("key", "value", "run_uuid", "step")):
            return True
        return path.is_dir() and bool(_run_folders(path))

    @classmethod
    def read(cls, path: Path, run: str | None) -> Tracked:
        return _of_folder(path, run) if path.is_dir() else _of_database(path, run)


def _of_database(path: Path, run: str | None) -> Tracked:
    with sqlite.opened(path, Mlflow.name) as base:
        found = base.rows("SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time")
        runs = {str(id): str(name or id) for id, name in found}
        id = chosen(path, runs, run)
        values = base.rows(
            "SELECT key, CASE is_nan WHEN 1 THEN 'nan' ELSE value END, timestamp, step FROM metrics WHERE run_uuid = ?",
            id,
        )
        rows = _rows((str(key), float(value), int(at), int(step)) for key, value, at, step in values)
        params = dict(base.rows("SELECT key, value FROM params WHERE run_uuid = ?", id))
    return Tracked(Mlflow.name, runs[id], rows, _config(params))


def _rows(values: Iterator[tuple[str, float, int, int]]) -> list[Row]:
    """A row for each moment and step, the earliest first."""
    rows: dict[tuple[int, int], Row] = {}
    for key, value, at_ms, step in values:
        rows.setdefault((at_ms, step), {"step": step, "timestamp": at_ms / 1e3})[key] = value
    return [rows[key] for key in sorted(rows)]


def _config(params: Mapping[Any, Any]) -> dict[str, Any]:
    """MLflow keeps parameters as text."""
    return {str(key): parse_expression(str(value)) for key, value in params.items()}


def _run_folders(path: Path) -> list[Path]:
    """A run's folder, those of an experiment, or those in `mlruns`; the earliest first."""
    for pattern in ("meta.yaml", "*/meta.yaml", "*/*/meta.yaml"):
        found = [file.parent for file in path.glob(pattern) if (file.parent / "metrics").is_dir()]
        if found:
            return sorted(found, key=lambda folder: (folder / "meta.yaml").stat().st_mtime)
    return []


def _of_folder(path: Path, run: str | None) -> Tracked:
    runs = {str(folder): _name(folder) for folder in _run_folders(path)}
    folder = Path(chosen(path, runs, run))
    try:
        rows = _rows(_values(folder))
        params = {file.name: read_text(file) for file in (folder / "params").glob("*") if file.is_file()}
    except (OSError, ValueError) as error:
        raise damaged(folder, Mlflow.name, error) from None
    return Tracked(Mlflow.name, runs[str(folder)], rows, _config(params))


def _name(folder: Path) -> str:
    """As its tag says; else the folder's name."""
    try:
        return read_text(folder / "tags" / "mlflow.runName").strip() or folder.name
    except (OSError, ValueError):
        return folder.name


def _values(folder: Path) -> Iterator[tuple[str, float, int, int]]:
    """(key, value, milliseconds, step) of each line of each metric. Raises OSError, ValueError."""
    count = 0
    for file in sorted((folder / "metrics").rglob("*")):
        if not file.is_file():
            continue
        key = file.relative_to(folder / "metrics").as_posix()
        for number, line in enumerate(read_text(file, _MOST_BYTES).splitlines(), 1):
            count += 1
            if count > MOST_VALUES:
                raise ValueError(f"it has more than {MOST_VALUES:,} values")
            try:
                at_ms, value, *step = line.split()
                yield key, float(value), int(at_ms), int(step[0]) if step else 0
            except ValueError:
                raise ValueError(f"{key}, line {number}: {line[:40]!r}") from None


TRACKERS = (Mlflow,)
