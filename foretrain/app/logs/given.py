"""What a user gives as a log: the file of one, a run that was watched, or one that a tracker has kept; read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.analysis.log_config import config_of, of_tracked, of_watched
from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes
from foretrain.comparison.sources import tables
from foretrain.comparison.sources.table_file import read_table
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.runs import columns, trackers
from foretrain.runs.columns import NAMES
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import LOG, WatchedRun, source_of
from foretrain.runs.trackers.tracker import Tracked
from foretrain.runs.training_log import TrainingLog, read_log, read_stream


@dataclass(frozen=True)
class GivenLog:
    """`log`: None where no step is in it, and `problem` says why. `path`: of the log; None for a pipe."""

    log: TrainingLog | None
    problem: UserError | None
    path: Path | None
    watched: WatchedRun | None = None
    kept: Tracked | None = None

    @property
    def name(self) -> str:
        if self.watched or self.kept:
            return self.watched.id if self.watched else self.kept.name if self.kept else ""
        return self.path.name if self.path else "stdin"

    @property
    def cards(self) -> list[str]:
        """The cards that it names, those that somebody saw at work first."""
        seen = [card.name for card in self.watched.cards if card.ours_peak_bytes] if self.watched else []
        if self.kept and isinstance(card := self.kept.config.get("gpu"), str) and not card.startswith("CPU"):
            seen.append(card)
        return seen + ([self.log.header.gpu_name] if self.log and self.log.header.gpu_name else [])

    def config(self, resolved: ResolvedConfig | None) -> RunConfig | None:
        """Of the run: as the user named it, else as the watched command or the tracker has it."""
        if resolved is None and self.kept:
            return of_tracked(self.kept)
        return config_of(resolved, self.log) or of_watched(self.watched.config if self.watched else None, self.log)


def is_watched(path: Path) -> bool:
    """Whether a directory is one that `foretrain watch` made."""
    return source_of(path) == "watched"


def is_tracked(path: Path) -> bool:
    """Whether a tracker has kept a run there. Raises UserError for damage."""
    return path.exists() and trackers.keeper_of(path) is not None


def read_given(source: str | Path | BinaryIO) -> GivenLog:
    """The log. Raises UserError for a record of a watched run, or a tracker's file, that is damaged."""
    if not isinstance(source, str | Path):
        return _read(lambda: read_stream(source, "stdin"), None)
    path = Path(source)
    if is_watched(path):
        watched, path = RunDirectory(path).record_of(WatchedRun), path / LOG
        return replace(_read(lambda: read_log(path), path), watched=watched)
    path, run = _with_run(path)
    if trackers.keeper_of(path):
        kept = trackers.read(path, run)
        return GivenLog(columns.log_of(kept, path), None, path, kept=kept)
    found = _read(lambda: read_log(path), path)
    if found.problem and found.problem.id == "data.log_unknown" and tables.claims(path, first_bytes(path, 4096)):
        return _read(lambda: _of_table(path, run), path)
    return found


def _of_table(path: Path, run: str | None) -> TrainingLog:
    """The table that a tracker has exported, as `compare` reads it. Raises UserError."""
    roles = tables.by_step(read_table(path, run), path, {})
    roles["timestamp"] = tables.seconds_of(roles)
    roles["step_s"] = {step: ms / 1e3 for step, ms in roles.get("step_ms", {}).items()} | roles.get("step_s", {})
    rows: dict[int, dict[str, Any]] = {}
    for role, values in roles.items():
        for step, value in values.items():
            rows.setdefault(step, {"step": step})[NAMES[role][0]] = value
    return columns.log_of(Tracked("table", path.name, [rows[step] for step in sorted(rows)]), path)


def _with_run(path: Path) -> tuple[Path, str | None]:
    """A path and, behind +run=, which one of the runs that a tracker keeps there."""
    before, sign, run = str(path).rpartition("+run=")
    return (Path(before), run) if sign and not path.exists() else (path, None)


def _read(how: Callable[[], TrainingLog], path: Path | None) -> GivenLog:
    try:
        return GivenLog(how(), None, path)
    except UserError as problem:
        return GivenLog(None, problem, path)
