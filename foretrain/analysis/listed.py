"""Every run in some folders, of foretrain's own, of watched commands and of Trainers: what `foretrain runs` lists."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from foretrain.analysis.measured_step import with_measured_step
from foretrain.base.errors import UserError
from foretrain.runs import folder, state, trainer_record, watch_record
from foretrain.runs.folder import RunDirectory, RunRecord
from foretrain.runs.trainer_record import TrainerRunRecord
from foretrain.runs.watch_record import WatchRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Listed:
    """Each run with its folder, by path; `unreadable`: why others could not be read."""

    runs: list[tuple[Path, RunRecord]]
    watched: list[tuple[Path, WatchRecord]]
    trainers: list[tuple[Path, TrainerRunRecord]]
    unreadable: list[UserError]


def listed(folders: Sequence[Path], tags: Iterable[str] = ()) -> Listed:
    """The runs in these folders and the two levels below them, that have all of these tags."""
    wanted, unreadable = set(tags), []

    def read_all(paths: Iterable[Path], read: Callable[[Path], T]) -> list[tuple[Path, T]]:
        found = []
        for path in paths:
            if wanted - set(state.read_label(path).tags):
                continue
            try:
                found.append((path, read(path)))
            except UserError as error:
                unreadable.append(error)
        return found

    roots = list(folders)
    return Listed(
        read_all((run.path for run in folder.find_runs(roots)), _own),
        read_all(watch_record.find(roots), watch_record.read),
        read_all(trainer_record.find(roots), trainer_record.read),
        unreadable,
    )


def _own(path: Path) -> RunRecord:
    directory = RunDirectory(path)
    return with_measured_step(directory, directory.read_record())


def is_run(path: Path) -> bool:
    """Whether a folder holds a run of any kind."""
    return any((path / name).is_file() for name in ("run.json", watch_record.RECORD, trainer_record.RECORD))
