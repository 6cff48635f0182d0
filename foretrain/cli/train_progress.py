"""The progress of a run on stderr, and how it ended on stdout."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast, get_args

from rich.text import Text

from foretrain.base.messages import printable, say
from foretrain.base.units import format_bytes, format_left, format_percent
from foretrain.cli.common import ERR, OUT, LiveLine, rewrites_lines
from foretrain.runs.folder import EvaluationMetrics, Event, Note, StepMetrics
from foretrain.runs.record import Status

# Notes that --quiet leaves, as --json does not tell them; that are not dim; and with which a run ends, on stdout.
TOLD_QUIETLY = (
    "checkpoint_skipped", "train.beyond_limit", "tracker_not_installed", "tracker_offline", "tracker_failed",
    "tracker_behind", "tracker_slow",
)  # fmt: skip
STYLES = {"train.beyond_limit": "yellow"}
ENDINGS = tuple(f"train.{status}" for status in (*get_args(Status), "already_finished"))
LINE_EVERY_S = 5.0  # a log file wants fewer lines than a terminal; metrics.jsonl has them all


class Printer:
    """Progress on stderr: one live line on a terminal, lines otherwise."""

    def __init__(self, quiet: bool, max_iters: int) -> None:
        self.quiet = quiet
        self.live = rewrites_lines(terminal=sys.stderr.isatty())
        self.width = len(str(max_iters))
        self.max_iters = max_iters
        self._live_line = LiveLine(ERR)
        self._next_line_s = 0.0

    def __call__(self, event: Event) -> None:
        if self.quiet and not (isinstance(event, Note) and event.id in TOLD_QUIETLY):
            return
        if isinstance(event, StepMetrics):
            self._step(event)
        elif isinstance(event, EvaluationMetrics):
            self._line(self._evaluation(event))
        elif event.id in ENDINGS:
            self.end(event)
        elif event.id == "train.start":
            mode = say(f"mode.{'compiled' if event.values['compiled'] else 'eager'}")
            self._line(Text(printable(say(event.id, **event.values, mode=mode)), style="bold"))
        else:
            id = event.id if "." in event.id else f"event.{event.id}"
            self._line(Text(printable(say(id, **event.values)), style=STYLES.get(event.id, "dim")))

    def _step(self, m: StepMetrics) -> None:
        parts = [
            f"step {m.step + 1:>{self.width}}/{self.max_iters}",
            f"loss {m.loss:.4f}",
            f"{m.tokens_per_s:,.0f} tok/s",
            f"MFU {format_percent(m.mfu)}" if m.mfu is not None else "",
            format_bytes(m.memory_bytes) if m.memory_bytes else "",
            f"ETA {format_left(m.eta_s)}",
            say("train.data_wait", share=m.data_wait_s / m.step_s) if m.data_wait_s > 0.01 * m.step_s else "",
        ]
        line = "  ".join(part for part in parts if part)
        if self.live:
            self._live_line.show(line)
        elif time.monotonic() >= self._next_line_s or m.step + 1 == self.max_iters:
            sys.stderr.write(line + "\n")
            self._next_line_s = time.monotonic() + LINE_EVERY_S

    def _evaluation(self, m: EvaluationMetrics) -> Text:
        text = f"step {m.step:>{self.width}}/{self.max_iters}  "
        text += say("train.evaluation", train=m.train_loss, val=m.val_loss, took=m.evaluation_s)
        return Text(text, style="bold" if m.best else "")

    def _line(self, text: Text) -> None:
        self._live_line.clear()
        ERR.print(text, soft_wrap=True)

    def end(self, event: Note) -> None:
        """The last line: how it ended, and what to do next."""
        self._live_line.leave()
        OUT.print(Text(printable(say(event.id, **event.values))), soft_wrap=True)


_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class Patient:
    """A stream that goes quiet when its reader is gone. `any_error`: nor does any other error come out."""

    def __init__(self, stream: TextIO, *, any_error: bool) -> None:
        self._stream, self._any_error = stream, any_error

    def write(self, text: str) -> int:
        with self._quiet():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._quiet():
            self._stream.flush()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:  # what is in the buffers has to go somewhere at the end
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            elif not self._any_error:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def patient_output() -> Iterator[None]:
    """SIGHUP is ignored and stdout and stderr are patient, for as long as this lasts."""
    old = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, Patient(old[0], any_error=False))
    sys.stderr = cast(TextIO, Patient(old[1], any_error=True))
    try:
        with hangup_ignored():
            yield
    finally:
        sys.stdout, sys.stderr = old


@contextlib.contextmanager
def hangup_ignored() -> Iterator[None]:
    """Unless somebody wants it for something else, SIGHUP does nothing; processes begun meanwhile inherit that."""
    number = getattr(signal, "SIGHUP", None)
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(number, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)
