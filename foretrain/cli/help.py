"""`--help` in the language that is spoken.

The English stands with each command and option. A language has it as cli_help.<command>.<option>, the summary of a
command as .summary and the remarks in its examples as .note_1 and so on. A text that several commands share has the
id of the first of them.
"""

import copy
import io
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from typer.core import TyperCommand

from foretrain.base import messages
from foretrain.cli.commands import SUMMARIES, Commands
from foretrain.cli.common import OUT

EXAMPLES = "Examples:"
PROSE_WIDTH = 100  # as reports/text.py has it
# The words that typer's help itself brings, by the name that they have in its module.
HEADINGS = {
    "ARGUMENTS_PANEL_TITLE": "Arguments",
    "OPTIONS_PANEL_TITLE": "Options",
    "COMMANDS_PANEL_TITLE": "Commands",
    "DEFAULT_STRING": "[default: {}]",
    "REQUIRED_LONG_STRING": "[required]",
}
USAGE = "Usage:"
# What stands behind it for words that the reader types.
PIECES = {"some_options": "[OPTIONS]", "a_command": "COMMAND [ARGS]..."}
_REMARK = re.compile(r"(?P<command>.*\S)(?P<gap>\s{2,})\((?P<note>.*)\)")


def speak(command: Any) -> None:
    """Have this command, as click has it, show its help in the language that is spoken."""
    command.format_help = partial(_show, command)
    command.get_usage = partial(_usage, command)


def texts(root: Any, *, deep: bool = True) -> dict[str, str]:
    """{id: English} of all that the help of these commands says; without `deep` of the root's own, with its list."""
    found = {f"cli_help.heading.{name.lower()}": text for name, text in _headings().items()}
    for id, text in (*_said(root, deep=deep), *_listed(root)):
        if text not in found.values():
            found[id] = text
    return found


def _headings() -> dict[str, str]:
    return {**HEADINGS, "usage": USAGE, **PIECES, "examples": EXAMPLES}


def _usage(command: Any, ctx: Any) -> str:
    """The line of usage; what the reader types stays as it is."""
    own = messages.texts(messages.current().id)
    text = type(command).get_usage(command, ctx)
    for id, english in {"usage": USAGE, **PIECES}.items():
        text = text.replace(english, own.get(f"cli_help.heading.{id}", english), 1)
    return text


def _listed(root: Any) -> Iterator[tuple[str, str]]:
    """(id, English) of each command in the list of commands, which imports none of them."""
    return ((f"cli_help.{name}.summary", SUMMARIES[name]) for name in root.commands if name in SUMMARIES)


def _said(command: Any, path: tuple[str, ...] = (), *, deep: bool = True) -> Iterator[tuple[str, str]]:
    """(id, English) of a command and of those under it, in their order."""
    prefix = f"cli_help.{'_'.join(path) or 'foretrain'}"
    yield f"{prefix}.summary", command.help or ""
    for parameter in (*command.params, command.get_help_option(_context(command))):
        if getattr(parameter, "help", None):
            yield f"{prefix}.{parameter.name}", parameter.help
    notes = [note for line in (command.epilog or "").split("\n") if (note := _note(line))]
    for number, note in enumerate(notes, 1):
        yield f"{prefix}.note_{number}", note
    for name, each in getattr(command, "commands", {}).items() if deep else ():
        yield from _said(each, (*path, name))


def _context(command: Any) -> Any:
    return command.context_class(command, info_name=command.name)


def _note(line: str) -> str:
    """What a line of the examples says beside the command; '' where it is nothing but one."""
    if found := _REMARK.fullmatch(line):
        return found["note"]
    return "" if line == EXAMPLES or "foretrain " in line else line.strip()


def _show(command: Any, ctx: Any, formatter: Any) -> None:
    from typer import rich_utils

    root, own = ctx.find_root().command, messages.texts(messages.current().id)
    # A text that several commands share has the id of the first: all are imported, where somebody translates it.
    english = messages.current().id == messages.ENGLISH
    ids = {text: id for id, text in texts(root, deep=command is not root and not english).items()}

    def say(english: str) -> str:
        return messages.isolated(own.get(ids.get(english, ""), english))

    def spoken(part: Any) -> Any:
        """A copy of a command or parameter with its help as it is said."""
        made = copy.copy(part)
        made.help = say(part.help) if getattr(part, "help", None) else None
        return made

    made = spoken(command)
    made.params, made.add_help_option = [spoken(each) for each in command.get_params(ctx)], False
    made.epilog = "\n".join(_line(line, say) for line in (command.epilog or "").split("\n"))
    made.get_usage = lambda _: command.get_usage(ctx)
    if hasattr(command, "commands"):
        made.commands = {name: spoken(each) for name, each in _in_a_list(command).items()}
    # Not isolated: a mark of direction must not come between the braces and what they are filled with.
    headings = {name: own.get(ids[text], text) for name, text in HEADINGS.items()}
    width = rich_utils.MAX_WIDTH or min(PROSE_WIDTH, OUT.width)
    with _changed(rich_utils, {**headings, "MAX_WIDTH": width}), _trimmed():
        rich_utils.rich_format_help(obj=made, ctx=ctx, markup_mode="rich")


def _in_a_list(group: Any) -> dict[str, Any]:
    """The commands of a group as a list shows them; those that are not imported yet stay so."""
    if isinstance(group.commands, Commands):
        return {name: TyperCommand(name, help=SUMMARIES[name]) for name in group.commands}
    return group.commands


@contextmanager
def _trimmed() -> Iterator[None]:
    """What is printed here goes out without the blanks that rich pads lines with; a terminal gets it as it is."""
    out = sys.stdout
    if out.isatty() or not (out.encoding or "").lower().startswith("utf"):
        yield
        return
    shown = io.StringIO()
    with redirect_stdout(shown):
        yield
    out.write("\n".join(line.rstrip() for line in shown.getvalue().split("\n")))


def _line(line: str, say: Any) -> str:
    note = _note(line)
    if line == EXAMPLES or (note and note == line.strip()):
        return say(line.strip())
    return line.replace(f"({note})", f"({say(note)})") if note else line


@contextmanager
def _changed(module: Any, values: Mapping[str, str | int]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Item(NamedTuple):
    """A word that is offered; of the framework's own kind it is only in some versions, and click's in others."""

    value: str
    type: str = "plain"
    help: str | None = None


def cards(incomplete: str) -> list[str]:
    """Names of cards that begin with this, in a form without blanks; the last one of a list such as 3060,40."""
    from foretrain.hardware.catalogue import catalogue

    before, comma, last = incomplete.rpartition(",")
    names = ["auto", "cpu", *(name.replace(" ", "-") for name in catalogue())]
    if last[:1].isdigit():
        names = [name.removeprefix("RTX-") for name in names]
    return [before + comma + name for name in names if name.lower().startswith(last.lower())]


def config_options(incomplete: str) -> list[str]:
    """Options of the config that begin with this, in either spelling: --n_layer=, --n-layer=."""
    from foretrain.config.options import OPTIONS

    written = "--" + incomplete.removeprefix("--").replace("-", "_")
    return [f"--{name}=" for name in OPTIONS if f"--{name}".startswith(written)]


def commands(incomplete: str) -> list[Any]:
    """Commands that begin with this, each with its summary. Importing all of them would take as long as a plan."""
    said = messages.texts(messages.current().id)
    begun = [name for name in SUMMARIES if name.startswith(incomplete)]
    return [Item(name, help=said.get(f"cli_help.{name}.summary", SUMMARIES[name])) for name in begun]


def complete(command: Any) -> None:
    """Have a command complete --gpu, and the config's options where it takes them."""
    for parameter in command.params:
        if parameter.name == "gpu":
            parameter.shell_complete = lambda ctx, incomplete: _items(cards(incomplete))
    if command.context_settings.get("ignore_unknown_options"):
        own = command.shell_complete

        def shell_complete(self: Any, ctx: Any, incomplete: str) -> list[Any]:
            more = config_options(incomplete) if incomplete.startswith("-") else []
            return [*own(ctx, incomplete), *_items(more)]

        command.shell_complete = MethodType(shell_complete, command)


def _items(words: list[str]) -> list[Any]:
    return [Item(word) for word in words]
