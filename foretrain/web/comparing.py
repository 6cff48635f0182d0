"""Which runs are asked to be compared, and where that is done: small ones in a thread, large ones in a process.

The metrics of a long run, parsed, take many times their size, and seconds in which sliders would stand still.
"""

import threading
from typing import Annotated

from pydantic import Field, StrictStr

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.web import child, comparison
from foretrain.web.asking import Made
from foretrain.web.observe import ObservedRun
from foretrain.web.runs import Runs

MOST = 4  # stand side by side in a table that can be read
LARGE_BYTES = 512 * 1024
TIMEOUT_S = 180.0


class Asked(Record):
    """Runs by the ids that the list of runs gave; the others are held against the first."""

    runs: Annotated[tuple[Annotated[StrictStr, Field(max_length=64)], ...], Field(min_length=2, max_length=MOST)]


class Comparer:
    """Compares runs of a server; of large ones one comparison at a time, the newest wins."""

    def __init__(self, known: Runs) -> None:
        self._known, self._turn = known, threading.Lock()
        self._child: child.Child | None = None

    def answer(self, asked: Asked) -> Made:
        """What the page shows of these runs. Raises UserError where the process ends without an answer."""
        found = self._known.all()
        chosen = [(id, found.get(id)) for id in asked.runs]
        if sum(_size(run) for _, run in chosen if run) <= LARGE_BYTES:
            return 200, comparison.made(chosen)
        self.stop()
        with self._turn:
            working = self._child = child.Child(
                "comparison", [[id, str(run.path) if run else None] for id, run in chosen]
            )
            if not working.finished(TIMEOUT_S):
                working.stop()
                raise UserError("page.compare_failed", reason=f"{TIMEOUT_S:.0f} s")
            if working.failure:
                raise UserError("page.compare_failed", reason=working.failure)
            return 200, working.answer

    def stop(self) -> None:
        """End what is being compared in a process, if anything is."""
        if self._child is not None:
            self._child.stop()


def _size(run: ObservedRun) -> int:
    """Bytes of its metrics."""
    try:
        return (run.path / "metrics.jsonl").stat().st_size
    except OSError:
        return 0
