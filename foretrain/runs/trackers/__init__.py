"""Trackers that a run can be reported to: the files here that list TRACKERS. Libraries are imported late."""

import difflib
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes
from foretrain.runs.trackers.tracker import Tracked, Tracker, damaged

HEAD_BYTES = 64


def _found() -> Iterator[type[Tracker]]:
    for file in pkgutil.iter_modules(__path__):
        if file.name != "report":
            yield from getattr(import_module(f"{__name__}.{file.name}"), "TRACKERS", ())


TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in _found()}


def asked_for(report_to: str, *, wandb_log: bool = False) -> tuple[str, ...]:
    """Return the trackers that a config names, each once. Raises UserError for an unknown one."""
    words = [word for word in re.split(r"[\s,]+", report_to.lower()) if word not in ("", "none")]
    words += ["wandb"] if wandb_log else []
    for word in words:
        if word not in TRACKERS:
            near = difflib.get_close_matches(word, TRACKERS, n=1)
            id = "usage.unknown_tracker_near" if near else "usage.unknown_tracker"
            raise UserError(id, name=word[:40], near=near[0] if near else "", trackers=list(TRACKERS))
    return tuple(dict.fromkeys(words))


def keeper_of(path: Path) -> type[Tracker] | None:
    """Return the tracker that has written this file or folder, if any. Raises UserError for damage."""
    first = first_bytes(path, HEAD_BYTES)
    return next((tracker for tracker in TRACKERS.values() if tracker.claims(path, first)), None)


def read(path: Path, run: str | None = None) -> Tracked:
    """Read a tracked run in this path, which `keeper_of` knows. Raises UserError."""
    keeper = keeper_of(path)
    if keeper is None:
        raise UserError("data.log_unreadable", path=str(path), reason="no tracker has written it")
    found = keeper.read(path, run)
    if not found.rows:
        raise damaged(path, keeper.name, "there are no values in it")
    return found
