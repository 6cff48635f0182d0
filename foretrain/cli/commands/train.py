"""`foretrain train`: run a config, with a forecast written beside it before it starts."""

import os
import sys
from functools import partial
from typing import NoReturn

from click.exceptions import Exit

from foretrain.app.train import UNSAID, Label, label_of, need_torch, train_resolved
from foretrain.base.errors import ExitCode, UserError
from foretrain.cli import keep_going as start_ranks
from foretrain.cli import keep_going as supervisor
from foretrain.cli.command import OF_CONFIG, command, flag, json_option, option, quiet_option, words_argument
from foretrain.cli.common import (
    bytes_bar,
    need_one_of,
    print_error,
    print_json,
    print_notes,
)
from foretrain.cli.train_progress import Printer, patient_output
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.runs.record import SCHEMA, TrainedRun
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


@command("train", EPILOG, **OF_CONFIG)
@words_argument
@option("--resume", "auto: resume the newest unfinished run in this out_dir; no: start a new one.", default="no")
@flag("--no-trial", "With batch_size = auto: trust the forecast and skip the trial.")
@flag("--auto-restart", "Resume from the last checkpoint automatically after a crash.")
@option("--name", "What to call the run in lists, comparisons and reports.")
@option("--note", "A note to keep with the run.")
@option("--tag", "A tag to find the run by; may be given several times.", multiple=True)
@option(
    "--gpus", "Train on N GPUs of this machine, a process each; without GPUs on the CPU.", default=0, low=0, high=1024
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
    """Say it once, by the first rank, or by one of a machine where the others have not heard of it; and be gone, as
    what Python does at its end would wait for the other ranks."""
    if place.first or (place.local_rank == 0 and not isinstance(error, OfRank)):
        print_error(error, as_json=as_json)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(error.exit_code))


def train(
    resolved: ResolvedConfig, *, resume: bool = False, quiet: bool = False, trial: bool = True, label: Label = UNSAID
) -> TrainedRun:
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
