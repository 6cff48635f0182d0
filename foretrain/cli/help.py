"""`--help` in the language that is spoken.

The English stands with each command and option. Other languages have cli_help.<command>.<option>, the summary as
.summary and remarks in examples as .note_1. A text of several commands has the first one's id.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretrain.base import messages
from foretrain.cli.common import OUT

EXAMPLES = "Examples:"
PROSE_WIDTH = 100  # as reports/text.py has it
HEADINGS = {
    "usage": "Usage:",
    "arguments": "Arguments",
    "options": "Options",
    "commands": "Commands",
    "default": "[default: {}]",
    "required": "[required]",
    "some_options": "[OPTIONS]",
    "a_command": "COMMAND [ARGS]...",
    "examples": EXAMPLES,
}
STYLES = {r"(?<![\w-])--[\w-]+": "bold cyan", r"(?<![\w-])-\w(?![\w-])": "bold green", r"<[^>]+>": "bold yellow"}
_REMARK = re.compile(r"(?P<command>.*\S)(?P<gap>\s{2,})\((?P<note>.*)\)")
Say = Callable[[str], str]  # the text in the language that is spoken


def texts(root: Any, *, deep: bool = True) -> dict[str, str]:
    """{id: English} of all that the help of these commands says; without `deep` of the root's own, with its list."""
    found = {f"cli_help.heading.{name}": text for name, text in HEADINGS.items()}
    listed = ((f"cli_help.{name}.summary", text) for name, text in root.summaries().items())
    for id, text in (*_said(root, deep=deep), *listed):
        if text not in found.values():
            found[id] = text
    return found


def _said(command: Any, path: tuple[str, ...] = (), *, deep: bool = True) -> Iterator[tuple[str, str]]:
    prefix = f"cli_help.{'_'.join(path) or 'foretrain'}"
    yield f"{prefix}.summary", command.help or ""
    for parameter in command.get_params(click.Context(command)):
        if parameter.help:
            yield f"{prefix}.{'help' if '--help' in parameter.opts else parameter.name}", parameter.help
    notes = [note for line in (command.epilog or "").split("\n") if (note := _note(line))]
    for number, note in enumerate(notes, 1):
        yield f"{prefix}.note_{number}", note
    for name, each in command.members().items() if deep and hasattr(command, "members") else ():
        yield from _said(each, (*path, name))


def _note(line: str) -> str:
    """What a line of the examples says beside the command; '' where it is nothing but one."""
    if found := _REMARK.fullmatch(line):
        return found["note"]
    return "" if line == EXAMPLES or "foretrain " in line else line.strip()


def shown(command: Any, ctx: click.Context) -> str:
    """The help of a command for the terminal or file that stdout is."""
    root, own = ctx.find_root().command, messages.texts(messages.current().id)
    # A text that several commands share has the id of the first: all are imported, where somebody translates it.
    english = messages.current().id == messages.ENGLISH
    ids = {text: id for id, text in texts(root, deep=command is not root and not english).items()}

    def say(text: str) -> str:
        return own.get(ids.get(text, ""), text)

    with OUT.capture() as drawn:
        OUT.print(Group(*_parts(command, ctx, say)), width=min(PROSE_WIDTH, OUT.width))
    return "\n".join(line.rstrip() for line in drawn.get().split("\n"))


def _parts(command: Any, ctx: click.Context, say: Say) -> Iterator[RenderableType]:
    pieces = [say(piece) for piece in command.collect_usage_pieces(ctx)]
    usage = Text(" ".join([say(HEADINGS["usage"]), ctx.command_path, *pieces]), "bold")
    usage.stylize("yellow", 0, len(say(HEADINGS["usage"])))
    yield Padding(usage, 1)
    yield Padding(_marked(say, command.help or ""), (0, 1, 1, 1))
    params = command.get_params(ctx)
    for kind, heading in ((click.Argument, "arguments"), (click.Option, "options")):
        if found := [param for param in params if isinstance(param, kind) and not getattr(param, "hidden", False)]:
            yield _panel(_parameters(found, say), say(HEADINGS[heading]))
    if hasattr(command, "summaries"):
        yield _panel(_commands(command.summaries(), say), say(HEADINGS["commands"]))
    yield Padding(_marked(str, "\n".join(_line(line, say) for line in (command.epilog or "").split("\n"))), 1)


def _line(line: str, say: Say) -> str:
    note = _note(line)
    if line == EXAMPLES or (note and note == line.strip()):
        return messages.isolated(say(line.strip()))
    return line.replace(f"({note})", f"({messages.isolated(say(note))})") if note else line


def _marked(say: Say, text: str) -> Text:
    made = Text(messages.isolated(say(text)) if say is not str else text)
    for pattern, style in STYLES.items():
        made.highlight_regex(pattern, style)
    return made


def _panel(table: Table, title: str) -> Panel:
    return Panel(table, border_style="dim", title=title, title_align="left")


def _table() -> Table:
    return Table(show_header=False, expand=True, box=None, pad_edge=False)


def _commands(summaries: dict[str, str], say: Say) -> Table:
    table = _table()
    table.add_column(style="bold cyan", no_wrap=True, width=max(map(len, summaries)))
    table.add_column(ratio=10)
    for name, text in summaries.items():
        table.add_row(name, _marked(say, text))
    return table


def _parameters(params: list[Any], say: Say) -> Table:
    table = _table()
    stars = any(param.required for param in params)
    for param in params:
        names = [", ".join(param.opts)] if isinstance(param, click.Option) else [param.human_readable_name]
        star = [Text("*" if param.required else "", "red")] if stars else []
        table.add_row(
            *star, *(_marked(str, name) for name in names), Text(_type(param), "bold yellow"), _help(param, say)
        )
    return table


def _type(param: Any) -> str:
    name = "str" if param.type is click.STRING else param.type.name
    name = f"<list[{name}]>" if param.nargs == -1 or getattr(param, "multiple", False) else f"<{name}>"
    if isinstance(param, click.Option) and (param.metavar or param.is_flag):
        name = param.metavar or ""
    low, high = (getattr(param.type, limit, None) for limit in ("low", "high"))
    limits = ("" if low is None else f"{low}<=") + "x" + ("" if high is None else f"<={high}")
    if high is None and low is not None:
        limits = f"x>={low}"
    return name if limits == "x" else f"{name} [{limits}]"


def _help(param: Any, say: Say) -> Columns:
    found = [_marked(say, param.help or "")]
    if param.required:
        found.append(Text(say(HEADINGS["required"]), "dim red"))
    elif not getattr(param, "is_flag", False) and param.default is not None and str(param.default).strip():
        found.append(Text(say(HEADINGS["default"]).format(param.default), "dim"))
    return Columns(found)
