"""`foretrain train`: run a config, with a forecast written beside it before it starts."""

import os
import sys
from functools import partial
from typing import Annotated, NoReturn

import typer

from foretrain.app.train import UNSAID, Label, label_of, need_torch, train_resolved
from foretrain.base.errors import ExitCode, UserError
from foretrain.cli import keep_going as start_ranks
from foretrain.cli import keep_going as supervisor
from foretrain.cli.common import (
    CONFIG_CONTEXT,
    Json,
    Quiet,
    Words,
    bytes_bar,
    need_one_of,
    print_error,
    print_json,
    print_notes,
)
from foretrain.cli.train_progress import Printer, patient_output
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.runs.folder import SCHEMA, RunRecord
from foretrain.training.place import OfRank, Place, place_of

EPILOG = """Examples:

foretrain train baby

foretrain train config/train_shakespeare_char.py --device=cpu --compile=false

foretrain train config.py --init_from=nanoGPT/out/ckpt.pt --init_optimizer        (continue where nanoGPT stopped)

foretrain train my.toml --batch_size=auto    (the largest micro-batch that fits here)

foretrain train my.toml --resume auto        (after Ctrl-C, a crash or a power cut)

foretrain train my.toml --auto-restart       (resumes automatically after a crash)

foretrain train my.toml --name "wider MLP" --tag sweep --note "twice the width"

foretrain train my.toml --report-to tensorboard,trackio    (wandb too; docs/trackers.md)

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
        typer.Option("--auto-restart", help="Resume from the last checkpoint automatically after a crash."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="What to call the run in lists, comparisons and reports.")] = None,
    note: Annotated[str | None, typer.Option(help="A note to keep with the run.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag to find the run by; may be given several times.")] = None,
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
    label = label_of(name, note, tag or ())
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
            record = train(resolved, resume=go_on, quiet=quiet or as_json, trial=not no_trial, label=label)
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


def train(
    resolved: ResolvedConfig, *, resume: bool = False, quiet: bool = False, trial: bool = True, label: Label = UNSAID
) -> RunRecord:
    """Train a resolved config with a live line; returns the record. Raises UserError."""
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
