"""`foretrain explain`: what a run, a training log or a memory snapshot says, and what it hides."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.base.errors import UserError
from foretrain.cli.common import CONFIG_CONTEXT, ERR, Json, noted, print_notes
from foretrain.config.resolve import resolve
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu
from foretrain.monitoring.training_log import TrainingLog, read_log, read_stream

if TYPE_CHECKING:
    from foretrain.monitoring.record import WatchRecord

EPILOG = """Examples:

foretrain explain out-baby              (a run, or a watched run)

foretrain explain snapshot.pickle       (torch.cuda.memory._dump_snapshot of any program; read as data, never run)

foretrain explain train.log

foretrain explain train.log --config config/train_gpt2.py --gpu "RTX 4070"

foretrain explain train.log --config my.py --batch_size=8 --json

ssh box cat out/train.log | foretrain explain - --config my.py --gpu 4090"""


def add_to(app: typer.Typer) -> None:
    app.command("explain", context_settings=CONFIG_CONTEXT, epilog=EPILOG)(explain_command)


def explain_command(
    log: Annotated[
        str,
        typer.Argument(
            help="A run directory, a PyTorch memory snapshot, or a log of nanoGPT, nanochat, build-nanogpt or "
            "llm.c; - reads a log from stdin.",
            metavar="RUN|SNAPSHOT|LOG",
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--KEY=VALUE]...", help="Options that override --config, as in plan.", show_default=False
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="Config of the run: a preset, TOML or nanoGPT config/*.py.", metavar="CONFIG"),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Card of the run; auto: the one the log names, or this machine's.")] = "auto",
    as_json: Json = False,
) -> None:
    """Explain a run, a log or a memory snapshot: where memory and time went, why it ran out, what to change."""
    from foretrain.cli.commands import explain_run

    if log != "-" and explain_run.explained(Path(log), as_json=as_json, with_config=bool(config or words)):
        return
    from foretrain.analysis.log_analysis import analyse
    from foretrain.analysis.log_config import config_of, of_watched

    sources = [*(config or []), *(words or [])]
    resolved = resolve(sources) if sources else None
    if resolved:
        print_notes(resolved.notes, quiet=as_json)
    watched, path = explain_run.watched(Path(log)) if log != "-" else (None, Path(log))
    ran_out = explain_run.ran_out(path) if log != "-" else None
    read, found = None, None
    try:
        read = read_stream(sys.stdin.buffer, "stdin") if log == "-" else read_log(path)
    except UserError as error:  # a program that printed no steps still took memory and time
        if watched is None and (ran_out is None or error.id == "data.log_unreadable"):
            raise
    used = config_of(resolved, read) or of_watched(watched.config if watched else None, read)
    card = card_of(gpu, read, watched)
    if read is not None:
        name = "stdin" if log == "-" else watched.id if watched else path.name
        found = analyse(read, name=name, config=used, gpu=card)
    explain_run.show(found, watched, explain_run.failures(ran_out, used, card), as_json=as_json)


def card_of(name: str, log: TrainingLog | None, watched: "WatchRecord | None") -> Gpu | None:
    """The card that was named, here, by NVML or in the log, or is in this machine. A log can be read without one."""
    seen = [card.name for card in watched.cards if card.ours_peak_bytes] if watched else []
    seen += [log.header.gpu_name] if log and log.header.gpu_name else []
    return devices.found(name, seen, lambda error: ERR.print(noted(error), soft_wrap=True))
