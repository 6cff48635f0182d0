"""The progress of a run on stderr, and how it ended on stdout."""

import sys
import time
from typing import get_args

from rich.text import Text

from foretrain.base.messages import printable, say
from foretrain.base.units import format_bytes, format_left, format_percent
from foretrain.cli.common import ERR, OUT, LiveLine, rewrites_lines
from foretrain.training.notes import Event, Note
from foretrain.training.store import EvaluationMetrics, Status, StepMetrics

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
