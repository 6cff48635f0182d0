"""Progress of bytes that are brought from another place, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from foretrain.base.messages import printable
from foretrain.cli.common import ERR


@contextmanager
def bytes_bar(label: str, total: int, *, quiet: bool) -> Iterator["Bar"]:
    """A bar of bytes on stderr; none where nobody looks."""
    if quiet or not total or not ERR.is_terminal:
        yield Bar(None, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=ERR, transient=True) as progress:
        yield Bar(progress, progress.add_task(printable(label), total=total))


class Bar:
    """Takes counts of bytes."""

    def __init__(self, progress: Progress | None, task: int | None) -> None:
        self._progress, self._task = progress, task

    def __call__(self, count: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, count)  # type: ignore[arg-type]
