"""`foretrain top`: what this machine's cards and runs do now, drawn again and again until Ctrl-C."""

import contextlib
import time
from pathlib import Path

from rich.control import Control

from foretrain.analysis.live import SCHEMA, look
from foretrain.base.errors import UserError
from foretrain.base.signals import StopFlag
from foretrain.cli.command import argument, command, flag, json_option, option
from foretrain.cli.common import OUT, print_json
from foretrain.hardware.card import Cards
from foretrain.reports import text
from foretrain.reports.views.runs import top_document

EPILOG = """Examples:
foretrain top
foretrain top ~/experiments --interval 5
foretrain top --once               (one picture, for a script or a log)
foretrain top --json               (one object, for a program)"""
_HEAD = 12  # lines of a screen that are not for runs, besides the cards'


@command("top", EPILOG)
@argument(
    "folders",
    "Folders to search, two levels deep. Default: this one, and every run alive on this machine.",
    nargs=-1,
    type=Path,
)
@option("--interval", "Seconds between two looks.", default=2.0)
@flag("--once", "Print one picture and exit.")
@json_option
def top_command(folders: list[Path], interval: float, once: bool, as_json: bool) -> None:
    """Watch this machine's cards and runs: phase, memory against the plan, speed, clocks, what is left."""

    if not 0.2 <= interval <= 3600:
        raise UserError("usage.top_interval", value=interval)
    for folder in folders:
        if not folder.is_dir():
            raise UserError("data.no_folder", path=str(folder))
    cards = Cards()
    with contextlib.closing(cards):
        if as_json:
            print_json(look(cards, folders).to_json(schema=SCHEMA))
        elif once or OUT.is_dumb_terminal or not OUT.is_terminal:  # a dumb one moves nothing
            text.render(top_document(look(cards, folders)), OUT)
        else:
            _go_on(cards, folders, interval)


def _go_on(cards: Cards, folders: list[Path], interval_s: float) -> None:
    """Draw until somebody presses Ctrl-C, or a signal ends it; the terminal is then as it was."""
    with StopFlag() as stop, OUT.screen():
        while not stop.stopping:
            next_s, top = time.monotonic() + interval_s, look(cards, folders)
            with OUT.capture() as drawn:  # as one piece, so that nothing flickers
                OUT.control(Control.clear(), Control.home())
                text.render(top_document(top, max(1, OUT.height - _HEAD - len(top.cards))), OUT)
            OUT.file.write(drawn.get())
            OUT.file.flush()
            while not stop.stopping and time.monotonic() < next_s:
                time.sleep(0.2)
