"""Saving beside the training: the loop copies the state to host memory, a thread writes it, one save at a time. Without
room for a copy, and at the end, the loop writes the state itself. A refused save leaves the earlier checkpoints; three
in a row end the run, and so does a failed last save; ranks agree on a failure at the next save."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.base.process_memory import resident_bytes
from foretrain.hardware.cpu import available_memory_bytes
from foretrain.model.peers import ALONE, Peers
from foretrain.model.step import TrainState
from foretrain.training import checkpoint
from foretrain.training.attempts import is_out_of_memory
from foretrain.training.checkpoint import Progress
from foretrain.training.tensor_files import Snapshot, live, staged

SPARE = 1.25  # of a copy's bytes has to be free
MOST_FAILURES = 3  # one after the other
_PASSING = ("disk.full", "disk.limit", "environment.cannot_write")  # may be over at the next save


class Saver:
    """Saves the checkpoints of a run, and waits for the last at its end. `blocked_s`: how long the loop was held up."""

    def __init__(
        self, folder: Path, keep: int, note: Callable[..., None], limit_bytes: int | None = None, peers: Peers = ALONE
    ) -> None:
        self.folder, self.keep, self.note, self.limit_bytes = folder, keep, note, limit_bytes
        self.peers = peers
        self.blocked_s = 0.0
        self._held_s = 0.0  # by the last save alone
        self.verified: set[int] = set()
        self._thread: threading.Thread | None = None
        self._unheard = False  # whether a save's result is still to be reported
        self._error: BaseException | None = None
        self._saved: Progress | None = None
        self._failures = 0

    def save(self, state: TrainState, progress: Progress, *, wait: bool) -> None:
        """Save this state, now or in the background. Raises UserError, also where too many saves before have failed."""
        before = time.monotonic()
        self.finish()
        started = time.monotonic()
        if self._saved != progress.model_copy(update={"elapsed_s": self._saved.elapsed_s if self._saved else 0.0}):
            snapshot = None if wait else self._staged(state)
            self._saved, self._unheard = progress, True
            if snapshot is None:
                self._write(live(state), progress)
            else:
                words = (snapshot, progress)
                self._thread = threading.Thread(target=self._write, args=words, name="checkpoint", daemon=True)
                self._thread.start()
            self._held_s = time.monotonic() - started
            if snapshot is None and (wait or self._may_tell()):
                self._report(last=wait)
        self.blocked_s += time.monotonic() - before

    def _staged(self, state: TrainState) -> Snapshot | None:
        needs = live(state).size_bytes * SPARE
        if state.parallel:
            needs *= state.parallel.sharing.per_node  # each of this machine's ranks copies as much
        free = available_memory_bytes()
        if state.device.type == "cpu" and self.limit_bytes is not None:
            free = min(free or self.limit_bytes, self.limit_bytes - (resident_bytes() or 0))
        if free is not None and free < needs:
            return None
        try:
            return staged(state)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _write(self, snapshot: Snapshot, progress: Progress) -> None:
        try:
            checkpoint.commit(self.folder, snapshot, progress, self.peers)
            with contextlib.suppress(OSError):  # removed after the next save instead
                self.verified = checkpoint.retain(self.folder, self.keep, progress.best_step, self.verified, self.peers)
        except BaseException as error:  # the loop raises it
            self._error = error

    def poll(self) -> None:
        """Look for the end of a save. Raises UserError where too many have failed."""
        if self._thread is not None and not self._thread.is_alive() and self._may_tell():
            self.finish()

    def _may_tell(self) -> bool:
        """Return whether a save's end may be reported at any step: of several ranks, where it cannot end the run."""
        return self._error is None or self.peers.world == 1

    def finish(self) -> None:
        """Wait for the save that is under way. Raises UserError where too many have failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._unheard:
            self._report()

    def _report(self, *, last: bool = False) -> None:
        self._unheard = False
        if self._error is not None:
            error, self._error, self._saved = self._error, None, None
            self._failures += 1
            passing = is_out_of_memory(error) or (isinstance(error, UserError) and error.id in _PASSING)
            if last or not passing or self._failures >= MOST_FAILURES:
                raise error
            self.note("save_failed", why=_why(error), kept=self._newest(), count=self._failures, most=MOST_FAILURES)
            return
        self._failures = 0
        assert self._saved is not None
        self.note("saved", name=checkpoint.path_of(self.folder, self._saved.step).name, save_s=self._held_s)

    def _newest(self) -> str:
        try:
            steps = checkpoint.steps_in(self.folder)
        except OSError:
            return say("save.kept_earlier")
        return (
            say("save.kept", name=checkpoint.path_of(self.folder, steps[-1]).name) if steps else say("save.kept_none")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception) and self._thread is not None:
            # The run's error counts, not its last save's; a second Ctrl-C does not even wait for that.
            self._thread.join()


def _why(error: BaseException) -> str:
    if not isinstance(error, UserError):
        return say("save.no_memory")
    if not error.id.startswith("disk."):
        return say("save.refused", **error.values)
    return say("save.full" if error.values["free"] < error.values["needs"] else "save.limit", **error.values)
