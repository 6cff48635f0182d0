"""Reports of what others trained: a log, a run that `foretrain watch` measured or a tracker keeps, one with
ForetrainCallback."""

from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.analysis.trainer_run import explain_directory
from foretrain.app.explain import log_of
from foretrain.app.logs import report as log_report
from foretrain.base.errors import UserError
from foretrain.comparison.loss_axes import loss_curves
from foretrain.comparison.sources import runs
from foretrain.comparison.sources.given import Given
from foretrain.reports.document import Document
from foretrain.reports.views import log as log_view
from foretrain.reports.views.finetune import run as trainer_view
from foretrain.runs.folder import RunDirectory


def log(path: Path, words: Sequence[str], gpu: str, tell: Callable[[tuple[UserError, ...]], None]) -> Document:
    """Of a log, a watched run, or one that a tracker keeps (+run= chooses one), with the words of its config. Raises
    UserError."""
    explained = log_of(path, list(words) or None, gpu, tell=lambda note: tell((note,)))
    return log_view.document(explained.explanation, log_report.gather(path, explained))


def trainer_run(directory: RunDirectory) -> Document:
    """Of a directory of ForetrainCallback's. Raises UserError where its records are damaged."""
    found = explain_directory(directory)
    subject = runs.of(Given(path=str(directory.path)), directory)
    return trainer_view.document(found, loss_curves([subject]))
