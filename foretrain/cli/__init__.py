"""The command line. `main` repeats an answer that is kept; for everything else it imports the program."""

import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from foretrain.base.process_memory import collected_later

if TYPE_CHECKING:
    from foretrain.cli.commands import app as app

KEEPING = (["plan"], ["advise"])  # commands that keep answers


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collected_later(stays=True):  # a fifth of what importing takes
        return import_module("foretrain.cli.commands").app


def main() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as >&- does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another encoding shows ? for what it lacks
            stream.reconfigure(errors="replace")
    if sys.argv[1:2] in KEEPING and import_module("foretrain.app.kept_answers").repeat():
        sys.exit(0)
    with collected_later(stays=True):
        program = import_module("foretrain.cli.commands")
    sys.exit(program.run())
