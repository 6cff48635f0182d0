"""`foretrain train`: run a config, with a forecast written beside it before it starts."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn, TextIO, cast, get_args

from click.exceptions import Exit
from rich.text import Text

from foretrain.app.train import UNSAID, Label, label_of, need_torch, train_resolved
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import printable, say
from foretrain.base.units import format_bytes, format_left, format_percent
from foretrain.cli import keep_going as start_ranks
from foretrain.cli import keep_going as supervisor
from foretrain.cli.command import OF_CONFIG, command, flag, json_option, option, quiet_option, words_argument
from foretrain.cli.common import (
    ERR,
    OUT,
    LiveLine,
    bytes_bar,
    need_one_of,
    print_error,
    print_json,
    print_notes,
    rewrites_lines,
)
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.runs.folder import EvaluationMetrics, Event, Note, StepMetrics
from foretrain.runs.record import SCHEMA, Status, TrainedRun
from foretrain.training.place import OfRank, Place, place_of

# Notes that --quiet leaves, as --json does not tell them; that are not dim; and with which a run ends, on stdout.
SHOWN_QUIETLY = (
    "checkpoint_skipped", "train.beyond_limit", "tracker_not_installed", "tracker_offline", "tracker_failed",
    "tracker_behind", "tracker_slow",
)  # fmt: skip
STYLES = {"train.beyond_limit": "yellow"}
ENDINGS = tuple(f"train.{status}" for status in (*get_args(Status), "already_finished"))
LINE_EVERY_S = 5.0  # a log file wants fewer lines than a terminal; metrics.jsonl has them all


class Printer:
    def __init__(self, quiet: bool, max_iters: int) -> None:
        self.quiet = quiet
        self.live = rewrites_lines(terminal=sys.stderr.isatty())
        self.width = len(str(max_iters))
        self.max_iters = max_iters
        self._live_line = LiveLine(ERR)
        self._next_line_s = 0.0

    def __call__(self, event: Event) -> None:
        if self.quiet and not (isinstance(event, Note) and event.id in SHOWN_QUIETLY):
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


EPILOG = """Examples:
foretrain train baby
foretrain train config/train_shakespeare_char.py --device=cpu --compile=false
foretrain train config.py --init_from=nanoGPT/out/ckpt.pt --init_optimizer        (continue where nanoGPT stopped)
foretrain train my.toml --batch_size=auto    (the largest micro-batch that fits here)
foretrain train my.toml --resume auto        (after Ctrl-C, a crash or a power cut)
foretrain train my.toml --auto-restart       (resumes automatically after a crash)
foretrain train my.toml --name "wider MLP" --tag sweep --note "twice the width"
foretrain train my.toml --report-to tensorboard,trackio    (wandb too; docs/runs.md)
foretrain train my.toml --gpus 2             (on two GPUs; torchrun and Slurm's srun work too)"""


@command("train", EPILOG, **OF_CONFIG)
@words_argument
@option(
    "--resume WORD",
    "auto: resume the newest unfinished run in this out_dir; no: start a new one.",
    default="no",
    group="run",
)
@flag("--no-trial", "With batch_size = auto: trust the forecast and skip the trial.")
@flag("--auto-restart", "Resume from the last checkpoint automatically after a crash.", group="run")
@option("--name", "What to call the run in lists, comparisons and reports.", group="run")
@option("--note", "A note to keep with the run.")
@option("--tag", "A tag to find the run by; may be given several times.", multiple=True)
@option(
    "--gpus N",
    "Train on N GPUs of this machine, a process each; without GPUs on the CPU.",
    default=0,
    low=0,
    high=1024,
    group="run",
)
@json_option
@quiet_option
def train_command(
    words: list[str],
    resume: str,
    no_trial: bool,
    auto_restart: bool,
    name: str | None,
    note: str | None,
    tag: list[str],
    gpus: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train a config, with a live line, evaluation and checkpoints. Ctrl-C saves; --resume auto resumes."""
    need_one_of("--resume", resume, ("auto", "no"))
    place = place_of(os.environ)
    label = label_of(name, note, tag)
    try:
        resolved = resolve(words)
        if auto_restart:
            need_torch()
            if place.world > 1:
                raise UserError("usage.auto_restart_of_a_rank")
            with patient_output():
                raise Exit(supervisor.keep_going(resolved.config))
        supervisor.end_with_parent()
        if start := start_ranks.wanted(gpus, resolved.config, os.environ):
            need_torch()
            print_notes(resolved.notes, quiet=quiet)
            with patient_output():
                raise Exit(start_ranks.run(start))
        print_notes(resolved.notes, quiet=quiet or place.world > 1)
        go_on = resume == "auto" or resolved.config.init_from == "resume"
        with patient_output():
            record = train(resolved, resume=go_on, quiet=quiet or as_json, trial=not no_trial, label=label)
            if as_json and place.first:
                print_json(record.to_json(schema=SCHEMA))
    except UserError as error:
        if place.world > 1:
            _end_rank(error, place, as_json=as_json)
        raise
    if record.status == "interrupted":
        raise Exit(int(ExitCode.STOPPED))


def _end_rank(error: UserError, place: Place, *, as_json: bool) -> NoReturn:
    """Print the error once, by the first rank or one of a machine that has not heard of it, and end at once."""
    if place.first or (place.local_rank == 0 and not isinstance(error, OfRank)):
        print_error(error, as_json=as_json)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(error.exit_code))


def train(
    resolved: ResolvedConfig, *, resume: bool = False, quiet: bool = False, trial: bool = True, label: Label = UNSAID
) -> TrainedRun:
    printer = Printer(quiet, resolved.config.max_iters)
    return train_resolved(
        resolved,
        resume=resume,
        trial=trial,
        listen=printer,
        bar=partial(bytes_bar, quiet=quiet),
        ends_process=True,
        label=label,
    )
