"""`foretrain top`: this machine's cards and runs now, drawn again and again until q is pressed."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from foretrain.analysis.live.record import SCHEMA
from foretrain.app.live.top import Look
from foretrain.base.errors import UserError
from foretrain.cli.commands.top.keys import Keys
from foretrain.cli.common import OUT, Json, print_json
from foretrain.reports.live.frame import SORTS, Shape, frame
from foretrain.reports.text import Trimmed

EPILOG = """Examples:

foretrain top

foretrain top ~/experiments --interval 5

foretrain top --once               (one picture, for a script or a log)

foretrain top --json               (one object, for a program)"""
FIRST_SIZE = 80, 24  # where nobody says how large the terminal is
_KEYS_S = 0.2  # so soon a key is heard, and a terminal that was made larger is filled


def add_to(app: typer.Typer) -> None:
    app.command("top", epilog=EPILOG)(top_command)


def top_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders to search, two levels deep. Default: this one, and every run alive on this machine."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Watch this machine's cards and runs: phase, memory against the plan, speed, clocks, energy, what is left."""

    if not 0.2 <= interval <= 3600:
        raise UserError("usage.top_interval", value=interval)
    for folder in folders or []:
        if not folder.is_dir():
            raise UserError("data.no_folder", path=str(folder))
    look = Look(folders)
    try:
        if as_json:
            print_json(look.now().to_json(schema=SCHEMA))
        elif once or OUT.is_dumb_terminal or not (OUT.is_terminal and sys.stdin.isatty()):  # a dumb one moves nothing
            OUT.print(Trimmed(frame(look.now(), _shape(OUT)), OUT.width), end="")
        else:
            _go_on(look, interval)
    finally:
        look.close()


def _shape(console: Console) -> Shape:
    """The console's size; that of a small terminal where it is none."""
    size = console.size
    return Shape(size.width, size.height if console.is_terminal else max(FIRST_SIZE[1], size.height))


def _go_on(look: Look, interval_s: float) -> None:
    """Draw until somebody presses q. A signal ends it with the terminal as it was."""
    sort = SORTS[0]
    with _ended_well(), Keys() as keys, Live(console=OUT, screen=True, auto_refresh=False) as live:
        while True:
            seen, next_s = look.now(), time.monotonic() + interval_s
            drawn = None
            while time.monotonic() < next_s:
                shape = replace(_shape(OUT), sort=sort, keys=keys.heard)
                if shape != drawn:
                    live.update(frame(seen, shape), refresh=True)
                    drawn = shape
                key = keys.next(min(_KEYS_S, max(0.0, next_s - time.monotonic())))
                if key in ("q", "\x1b"):
                    return
                if key == "s":
                    sort = SORTS[(SORTS.index(sort) + 1) % len(SORTS)]


@contextlib.contextmanager
def _ended_well() -> Iterator[None]:
    """SIGTERM and a terminal that closes come out as an exception, so that the terminal is put back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    old = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
