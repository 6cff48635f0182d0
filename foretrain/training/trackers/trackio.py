"""trackio: on this machine, in its SQLite files; to a Space only where TRACKIO_SPACE_ID says so.

A project is a SQLite file in TRACKIO_DIR, or in the cache of Hugging Face. It is read with Python's own sqlite3.
"""

import importlib
import json
import os
import secrets
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from foretrain.training.trackers import sqlite
from foretrain.training.trackers.names import STEP
from foretrain.training.trackers.tracker import Job, Row, Started, Tracked, Tracker, chosen, damaged


class Trackio(Tracker):
    """Reports to trackio. It goes on with a run by its name, so a name that is taken gets an ending of its own."""

    name, package, check, project = "trackio", "trackio", "`TRACKIO_SERVER_URL`, `TRACKIO_DIR`", "TRACKIO_PROJECT"

    def start(self, job: Job) -> Started:
        space, server = os.environ.get("TRACKIO_SPACE_ID"), os.environ.get("TRACKIO_SERVER_URL", "")
        if not space and not server:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it asks the Hub for the user's name otherwise
        trackio: Any = importlib.import_module("trackio")
        name = job.resumed or self._free_name(job)
        self.run = trackio.init(
            project=job.project, name=name, config=dict(job.config), resume="allow" if job.resumed else "never",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        look = server.partition("?")[0] or f"trackio show --project {job.project}"  # a token stands behind the ?
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
        return sqlite.has(path, head, "metrics", ("run_name", "step", "metrics"))

    @classmethod
    def read(cls, path: Path, run: str | None) -> Tracked:
        with sqlite.opened(path, cls.name) as base:
            key = "run_id" if "run_id" in base.columns("metrics") else "run_name"  # which older versions lack
            found = base.rows(f"SELECT {key}, run_name FROM metrics GROUP BY {key} ORDER BY MAX(id)")
            runs = {str(id): str(name) for id, name in found}
            id = chosen(path, runs, run)
            lines = base.rows(f"SELECT step, timestamp, metrics FROM metrics WHERE {key} = ? ORDER BY id", id)
            rows = [{**_metrics(text, path), "step": step} for step, _, text in lines]
            if not _in_batches(lines):
                rows = [{**row, "timestamp": at} for row, (_, at, _) in zip(rows, lines, strict=True)]
            configs = [_json(text) for (text,) in base.rows(f"SELECT config FROM configs WHERE {key} = ?", id)]
        config = configs[-1] if configs else {}
        return Tracked(
            cls.name, runs[id], rows, {key: value for key, value in config.items() if not key.startswith("_")}
        )


def _in_batches(lines: list[tuple[Any, ...]]) -> bool:
    """Whether steps share their times: trackio stamps what it writes at once, and that tells no step's time."""
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
