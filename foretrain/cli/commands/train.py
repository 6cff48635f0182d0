"""`foretrain train`: run a config, with a forecast written beside it before it starts."""

import os
import sys
import time
from functools import partial
from typing import Annotated, NoReturn, get_args

import typer
from rich.text import Text

from foretrain.app.train import need_torch, train_resolved
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import printable, say
from foretrain.base.units import format_bytes, format_left, format_percent
from foretrain.cli.commands import keep_going as supervisor
from foretrain.cli.commands import start_ranks
from foretrain.cli.common import (
    CONFIG_CONTEXT,
    ERR,
    OUT,
    Json,
    Quiet,
    Words,
    need_one_of,
    print_error,
    print_json,
    print_notes,
)
from foretrain.cli.fetching import bytes_bar
from foretrain.cli.old_options import spellings
from foretrain.cli.patient import patient_output
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.training.notes import Event, Note
from foretrain.training.ranks.place import OfRank, Place, place_of
from foretrain.training.store import SCHEMA, EvaluationMetrics, RunRecord, Status, StepMetrics

# Notes that --quiet leaves, as --json does not tell them; that are not dim; and with which a run ends, on stdout.
TOLD_QUIETLY = ("checkpoint_skipped", "train.beyond_limit")
STYLES = {"train.beyond_limit": "yellow"}
ENDINGS = tuple(f"train.{status}" for status in (*get_args(Status), "already_finished"))
LINE_EVERY_S = 5.0  # a log file wants fewer lines than a terminal; metrics.jsonl has them all

EPILOG = """Examples:

foretrain train baby

foretrain train config/train_shakespeare_char.py --device=cpu --compile=false

foretrain train config.py --init_from=nanoGPT/out/ckpt.pt --init_optimizer        (continue where nanoGPT stopped)

foretrain train my.toml --batch_size=auto    (the largest micro-batch that fits here)

foretrain train my.toml --resume auto        (after Ctrl-C, a crash or a power cut)

foretrain train my.toml --auto-restart       (resumes automatically after a crash)

foretrain train my.toml --gpus 2             (on two GPUs; torchrun and Slurm's srun work too)"""


def add_to(app: typer.Typer) -> None:
    app.command("train", context_settings=CONFIG_CONTEXT, epilog=EPILOG)(train_command)


def train_command(
    words: Words = None,
    resume: Annotated[
        str,
        typer.Option(help="auto: resume the newest unfinished run in this out_dir; no: start a new one."),
    ] = "no",
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="With batch_size = auto: trust the forecast and skip the trial.")
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option(*spellings("--auto-restart"), help="Resume from the last checkpoint automatically after a crash."),
    ] = False,
    gpus: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Train on N GPUs of this machine, a process each; without GPUs on the CPU."),
    ] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a config, with a live line, evaluation and checkpoints. Ctrl-C saves; --resume auto resumes."""
    need_one_of("--resume", resume, ("auto", "no"))
    place = place_of(os.environ)
    try:
        resolved = resolve(words or [])
        if keep_going:
            need_torch()
            if place.world > 1:
                raise UserError("usage.auto_restart_of_a_rank")
            with patient_output():
                raise typer.Exit(supervisor.keep_going(resolved.config))
        supervisor.end_with_parent()
        if start := start_ranks.wanted(gpus, resolved.config, os.environ):
            need_torch()
            print_notes(resolved.notes, quiet=quiet)
            with patient_output():
                raise typer.Exit(start_ranks.run(start))
        print_notes(resolved.notes, quiet=quiet or place.world > 1)
        go_on = resume == "auto" or resolved.config.init_from == "resume"
        with patient_output():
            record = train(resolved, resume=go_on, quiet=quiet or as_json, trial=not no_trial)
            if as_json and place.first:
                print_json(record.to_json(schema=SCHEMA))
    except UserError as error:
        if place.world > 1:
            _end_rank(error, place, as_json=as_json)
        raise
    if record.status == "interrupted":
        raise typer.Exit(int(ExitCode.STOPPED))


def _end_rank(error: UserError, place: Place, *, as_json: bool) -> NoReturn:
    """Say it once, by the first rank, or by one of a machine where the others have not heard of it; and be gone, as
    what Python does at its end would wait for the other ranks."""
    if place.first or (place.local_rank == 0 and not isinstance(error, OfRank)):
        print_error(error, as_json=as_json)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(error.exit_code))


def train(resolved: ResolvedConfig, *, resume: bool = False, quiet: bool = False, trial: bool = True) -> RunRecord:
    """Train a resolved config with a live line; returns the record. Raises UserError."""
    printer = Printer(quiet, resolved.config.max_iters)
    return train_resolved(
        resolved, resume=resume, trial=trial, listen=printer, bar=partial(bytes_bar, quiet=quiet), ends_process=True
    )


class Printer:
    """Progress on stderr: one live line on a terminal, lines otherwise."""

    def __init__(self, quiet: bool, max_iters: int) -> None:
        self.quiet = quiet
        self.live = sys.stderr.isatty()
        self.width = len(str(max_iters))
        self.max_iters = max_iters
        self._pending = False
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
            sys.stderr.write("\r\x1b[2K" + line[: max(20, ERR.width - 1)])
            sys.stderr.flush()
            self._pending = True
        elif time.monotonic() >= self._next_line_s or m.step + 1 == self.max_iters:
            sys.stderr.write(line + "\n")
            self._next_line_s = time.monotonic() + LINE_EVERY_S

    def _evaluation(self, m: EvaluationMetrics) -> Text:
        text = f"step {m.step:>{self.width}}/{self.max_iters}  "
        text += say("train.evaluation", train=m.train_loss, val=m.val_loss, took=m.evaluation_s)
        return Text(text, style="bold" if m.best else "")

    def _line(self, text: Text) -> None:
        if self._pending:
            sys.stderr.write("\r\x1b[2K")
            self._pending = False
        ERR.print(text, soft_wrap=True)

    def end(self, event: Note) -> None:
        """The last line: how it ended, and what to do next."""
        if self._pending:
            sys.stderr.write("\n")
            self._pending = False
        OUT.print(Text(printable(say(event.id, **event.values))), soft_wrap=True)
