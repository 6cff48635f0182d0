"""`foretrain watch`: somebody else's training, measured from outside and not changed."""

import contextlib
import shutil
from pathlib import Path

from click.exceptions import Exit

from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.cli.command import argument, command, json_option, option, quiet_option
from foretrain.cli.common import ERR, noted, print_json
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.data.corpus import data_of_config
from foretrain.reports import text
from foretrain.reports.views import log as log_view
from foretrain.runs import folder
from foretrain.runs.record import SCHEMA, WatchedRun
from foretrain.training.watch import watch

EPILOG = """Examples:
foretrain watch -- python train.py config/train_gpt2.py
foretrain watch --out runs/a --interval 5 -- torchrun --nproc_per_node=2 train.py
foretrain watch --json -- ./train_gpt2cu > watch.json        (the command's output goes to stderr)
foretrain explain watch                                      (where memory and time went)"""
# What stands behind the first word of the command is the command's.
EMPTY_S = 5.0  # a silent command that runs longer was perhaps working
CONTEXT = {"allow_interspersed_args": False}


@command("watch", EPILOG, **CONTEXT)
@argument("command -- COMMAND", "The command to run, after --.", nargs=-1, required=True)
@option("--out", "Directory to create; if it exists, NAME-2, and so on.", default="watch")
@option("--interval", "Seconds between two samples of cards and processes.", default=1.0)
@json_option
@quiet_option
def watch_command(command: list[str], out: str, interval: float, as_json: bool, quiet: bool) -> None:
    """Measure a training command without changing it: memory, energy, clocks, log. Returns its exit code."""

    if not out:
        raise UserError("usage.empty_value", option="--out")
    if not 0.05 <= interval <= 3600:
        raise UserError("usage.watch_interval", value=interval)
    if not command[0].strip():
        raise UserError("environment.cannot_start", command=command[0], reason="it is empty")
    directory = folder.create(out)
    try:
        record = watch(
            command, directory, interval_s=interval, config=config_of(command), out=2 if as_json else 1, err=2
        )
    except UserError:
        _remove(directory.path)
        raise
    finally:
        directory.release()
    if _is_empty(record):
        _remove(directory.path)
        if as_json:
            print_json({**record.to_json(schema=SCHEMA), "path": None})
        elif not quiet:
            ERR.print(noted(say("watch.empty", code=record.exit_code or 0, wall=record.wall_s)), soft_wrap=True)
        raise Exit(record.exit_code or 0)
    if as_json:
        print_json({**record.to_json(schema=SCHEMA), "path": str(directory.path)})
    elif not quiet:
        with contextlib.suppress(BrokenPipeError):
            text.render(log_view.summary(record, str(directory.path)), ERR)
    raise Exit(record.exit_code or 0)


def _is_empty(record: "WatchedRun") -> bool:
    """Whether there is nothing to keep: it wrote nothing, used no card, and was over before it could be measured."""
    worked = any(card.ours_peak_bytes for card in record.cards)
    return not record.log_bytes and not worked and record.wall_s < EMPTY_S


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def config_of(command: list[str]) -> "RunConfig | None":
    """The config that a nanoGPT command names, read as data: its script has configurator.py beside it."""

    script = next((i for i, word in enumerate(command) if word.endswith(".py")), None)
    if script is None or not (Path(command[script]).parent / "configurator.py").is_file():
        return None
    words = [word for word in command[script + 1 :] if word.startswith("--") or word.endswith(".py")]
    try:
        return data_of_config(resolve(words)).config  # nanoGPT looks for its data where it is started, and so do we
    except (UserError, OSError, ValueError):  # another fork's options; the log has what it printed
        return None
