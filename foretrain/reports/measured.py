"""Reports of what others trained: a log, a run that `foretrain watch` measured, one with ForetrainCallback."""

from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.analysis.trainer_run import of_directory
from foretrain.app import log_report
from foretrain.app.explain import log_of
from foretrain.base.errors import UserError
from foretrain.comparison.loss_axes import loss_curves
from foretrain.comparison.sources import trainer_runs
from foretrain.comparison.sources.given import Given
from foretrain.monitoring import record as watch_record
from foretrain.monitoring import trainer_record
from foretrain.reports.document import Document
from foretrain.reports.views import log as log_view
from foretrain.reports.views.finetune import run as trainer_view


def is_watched(path: Path) -> bool:
    """Whether a directory is one that `foretrain watch` made."""
    return watch_record.is_watched(path)


def log(path: Path, words: Sequence[str], gpu: str, tell: Callable[[tuple[UserError, ...]], None]) -> Document:
    """Of a log, or a watched run, with the words of its config. Raises UserError."""
    explained = log_of(path, list(words) or None, gpu, tell=lambda note: tell((note,)))
    return log_view.document(explained.explanation, log_report.gather(path, explained))


def is_trainer_run(path: Path) -> bool:
    """Whether this is a directory of ForetrainCallback's, or the record in it."""
    return trainer_record.is_one(path) or path.name == trainer_record.RECORD


def trainer_run(path: Path) -> Document:
    """Of a directory of ForetrainCallback's. Raises UserError where its records are damaged."""
    path = path if path.is_dir() else path.parent
    found = of_directory(path)
    subject = trainer_runs.of(Given(path=str(path)), found.record, trainer_record.lines(path))
    return trainer_view.document(found, loss_curves([subject]))
