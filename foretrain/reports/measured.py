"""Reports of what others trained: a log, a run that `foretrain watch` measured or a tracker keeps, one with
ForetrainCallback."""

from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.analysis import trainer_run as analysis
from foretrain.app.explain import log_of
from foretrain.app.logs import given
from foretrain.app.logs import report as log_report
from foretrain.base.errors import UserError
from foretrain.comparison.loss_axes import loss_curves
from foretrain.comparison.sources import trainer_runs
from foretrain.comparison.sources.given import Given
from foretrain.reports.document import Document
from foretrain.reports.views import log as log_view
from foretrain.reports.views.finetune import run as trainer_view
from foretrain.runs.folder import RunDirectory


def is_watched(path: Path) -> bool:
    """Whether a directory is one that `foretrain watch` made."""
    return given.is_watched(path)


def is_tracked(path: Path) -> bool:
    """Whether a tracker has kept a run there. Raises UserError for damage."""
    return given.is_tracked(path)


def log(path: Path, words: Sequence[str], gpu: str, tell: Callable[[tuple[UserError, ...]], None]) -> Document:
    """Of a log, a watched run, or one that a tracker keeps (+run= chooses one), with the words of its config. Raises
    UserError."""
    explained = log_of(path, list(words) or None, gpu, tell=lambda note: tell((note,)))
    return log_view.document(explained.explanation, log_report.gather(path, explained))


def is_trainer_run(path: Path) -> bool:
    """Whether this is a directory of ForetrainCallback's, or the record in it."""
    return analysis.is_one(path)


def trainer_run(path: Path, directory: RunDirectory | None = None) -> Document:
    """Of a directory of ForetrainCallback's; `directory`: one that is only looked at. Raises UserError where its
    records are damaged."""
    path = path if path.is_dir() else path.parent
    found = analysis.of_directory(path, directory)
    subject = trainer_runs.of(Given(path=str(path)), found.record, analysis.lines_of(path))
    return trainer_view.document(found, loss_curves([subject]))
