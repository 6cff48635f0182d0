"""trackio: a project is a SQLite file in TRACKIO_DIR or Hugging Face's cache; in a Space only by TRACKIO_SPACE_ID."""

import contextlib
import importlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from foretrain.runs.trackers.tracker import MOST_VALUES, STEP, Job, Row, Started, Tracked, Tracker, chosen, damaged

_MAGIC = b"SQLite format 3\x00"
_MOST_INSTRUCTIONS = 200_000_000  # of a query; a foreign file may hold an endless one


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    connection = None
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        connection.execute("PRAGMA trusted_schema = OFF")
        count = iter(range(_MOST_INSTRUCTIONS // 1000))
        connection.set_progress_handler(lambda: next(count, None) is None, 1000)
        yield connection
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise damaged(path, Trackio.name, error) from None
    finally:
        if connection is not None:
            connection.close()


def _rows(base: sqlite3.Connection, query: str, *values: Any) -> list[tuple[Any, ...]]:
    rows = base.execute(f"{query} LIMIT {MOST_VALUES + 1}", values).fetchall()
    if len(rows) > MOST_VALUES:
        raise sqlite3.DataError(f"it has more than {MOST_VALUES:,} values")
    return rows


def _columns(base: sqlite3.Connection) -> set[str]:
    kind = base.execute("SELECT type FROM sqlite_master WHERE name = 'metrics'").fetchone()
    return {name for _, name, *_ in base.execute("PRAGMA table_info(metrics)")} if kind == ("table",) else set()


class Trackio(Tracker):
    """Reports to trackio, which resumes a run by its name, so a taken name gets a suffix."""

    name, package, check, project = "trackio", "trackio", "`TRACKIO_SERVER_URL`, `TRACKIO_DIR`", "TRACKIO_PROJECT"

    def start(self, job: Job) -> Started:
        space, server = os.environ.get("TRACKIO_SPACE_ID"), os.environ.get("TRACKIO_SERVER_URL", "")
        if not space and not server:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else it asks the Hub for the user's name
        trackio: Any = importlib.import_module("trackio")
        name = job.resumed or self._free_name(job)
        self.run = trackio.init(
            project=job.project, name=name, config=dict(job.config), resume="allow" if job.resumed else "never",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        look = server.partition("?")[0] or f"trackio show --project {job.project}"  # a token is behind the ?
        if space:
            look = f"https://huggingface.co/spaces/{space}"
        return Started(id=name, look=look)

    def _free_name(self, job: Job) -> str:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        taken = storage.get_runs(job.project)
        return f"{job.name}-{secrets.token_hex(2)}" if job.name in taken else job.name

    def log(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        self.run.log({**values, STEP: step}, step=step)

    def finish(self, status: str) -> None:
        self.run.finish()

    @classmethod
    def claims(cls, path: Path, head: bytes) -> bool:
        if not head.startswith(_MAGIC):
            return False
        with _opened(path) as base:
            return {"run_name", "step", "metrics"} <= _columns(base)

    @classmethod
    def read(cls, path: Path, run: str | None) -> Tracked:
        with _opened(path) as base:
            key = "run_id" if "run_id" in _columns(base) else "run_name"  # which older versions lack
            found = _rows(base, f"SELECT {key}, run_name FROM metrics GROUP BY {key} ORDER BY MAX(id)")
            runs = {str(id): str(name) for id, name in found}
            id = chosen(path, runs, run)
            lines = _rows(base, f"SELECT step, timestamp, metrics FROM metrics WHERE {key} = ? ORDER BY id", id)
            rows = [{**_metrics(text, path), "step": step} for step, _, text in lines]
            if not _in_batches(lines):
                rows = [{**row, "timestamp": at} for row, (_, at, _) in zip(rows, lines, strict=True)]
            configs = [_json(text) for (text,) in _rows(base, f"SELECT config FROM configs WHERE {key} = ?", id)]
        config = configs[-1] if configs else {}
        return Tracked(
            cls.name, runs[id], rows, {key: value for key, value in config.items() if not key.startswith("_")}
        )


def _in_batches(lines: list[tuple[Any, ...]]) -> bool:
    """Return whether steps share their times: trackio stamps a batch of writes, which tells no step's time."""
    return any(one[0] != other[0] and one[1] == other[1] for one, other in pairwise(lines))


def _json(text: Any) -> dict[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _metrics(text: Any, path: Path) -> Row:
    try:
        return {key: value for key, value in _json(text).items() if isinstance(value, int | float | str)}
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, Trackio.name, error) from None


TRACKERS = (Trackio,)
