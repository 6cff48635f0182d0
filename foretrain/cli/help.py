"""`--help` in the language that is spoken. Other languages have cli_help.<command>.<option>, the summary as .summary
and remarks in examples as .note_1; a text of several commands has the first one's id."""

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
from foretrain.cli import completion
from foretrain.cli.common import OUT

EXAMPLES = "Examples:"
PROSE_WIDTH = 100  # as reports/text.py has it
HEADINGS = {
    "usage": "Usage:",
    "arguments": "Arguments",
    "commands": "Commands",
    "plan": "Plan",
    "train": "Train and fine-tune",
    "look_back": "Look back",
    "use_model": "Use the model",
    "machine": "This machine",
    "card": "Card",
    "run": "Run",
    "pretraining": "Pretraining",
    "finetuning": "Fine-tuning",
    "inference": "Generating text",
    "questions": "Questions",
    "options": "Options",
    "output": "Output",
    "rest": "All {} options: {}",
    "default": "[default: {}]",
    "required": "[required]",
    "some_options": "[OPTIONS]",
    "a_command": "COMMAND [ARGS]...",
    "examples": EXAMPLES,
}
STYLES = {r"(?<![\w-])--[\w-]+": "bold cyan", r"(?<![\w-])-\w(?![\w-])": "bold green", r"<[^>]+>": "bold yellow"}
_USUAL = 8  # of a config's options, the first on the page stand in the short help
_SENTENCE, _CLAUSE = re.compile(r"(?<=[.?।؟])\s"), re.compile(r"[;؛]\s")
_REMARK = re.compile(r"(?P<command>.*\S)(?P<gap>\s{2,})\((?P<note>.*)\)")
Say = Callable[[str], str]  # the text in the language that is spoken


def texts(root: Any, *, deep: bool = True) -> dict[str, str]:
    """{id: English} of all that the help of these commands says; without `deep` of the root's own, with its list."""
    found = {f"cli_help.heading.{name}": text for name, text in HEADINGS.items()}
    listed = ((f"cli_help.{name}.summary", text) for name, text in root.summaries().items())
    for id, text in (*_summaries(root, deep=deep), *listed):
        if text not in found.values():
            found[id] = text
    return found


def _summaries(command: Any, path: tuple[str, ...] = (), *, deep: bool = True) -> Iterator[tuple[str, str]]:
    prefix = f"cli_help.{'_'.join(path) or 'foretrain'}"
    yield f"{prefix}.summary", command.help or ""
    for parameter in command.get_params(click.Context(command)):
        if parameter.help:
            yield f"{prefix}.{'help' if '--help' in parameter.opts else parameter.name}", parameter.help
    notes = [note for line in (command.epilog or "").split("\n") if (note := _note(line))]
    for number, note in enumerate(notes, 1):
        yield f"{prefix}.note_{number}", note
    for name, each in command.members().items() if deep and hasattr(command, "members") else ():
        yield from _summaries(each, (*path, name))


def _note(line: str) -> str:
    """What a line of the examples says beside the command; '' where it is nothing but one."""
    if found := _REMARK.fullmatch(line):
        return found["note"]
    return "" if line == EXAMPLES or "foretrain " in line else line.strip()


def shown(command: Any, ctx: click.Context, *, whole: bool = False) -> str:
    """The help of a command for the terminal or file that stdout is. `whole`: with every option."""
    root, own = ctx.find_root().command, messages.texts(messages.current().id)
    # A text that several commands share has the id of the first: all are imported, where somebody translates it.
    english = messages.current().id == messages.ENGLISH
    ids = {text: id for id, text in texts(root, deep=command is not root and not english).items()}
    if command.is_grouped and not english:
        kinds = completion.options_of(command.name).values()
        ids |= {each.help: f"{each.texts}.{name}" for options in kinds for name, each in options.items()}

    def say(text: str) -> str:
        return own.get(ids.get(text, ""), text)

    with OUT.capture() as drawn:
        OUT.print(Group(*_parts(command, ctx, say, whole)), width=min(PROSE_WIDTH, OUT.width))
    return "\n".join(line.rstrip() for line in drawn.get().split("\n"))


def _parts(command: Any, ctx: click.Context, say: Say, whole: bool) -> Iterator[RenderableType]:
    short = command.is_grouped and not whole
    pieces = [say(piece) for piece in command.collect_usage_pieces(ctx)]
    usage = Text(" ".join([say(HEADINGS["usage"]), ctx.command_path, *pieces]), "bold")
    usage.stylize("yellow", 0, len(say(HEADINGS["usage"])))
    yield Padding(usage, 1)
    yield Padding(_marked(say, command.help or ""), (0, 1, 1, 1))
    rows = _rows(command, ctx, say, short)
    longest = max(len(name) for listed in rows.values() for name, _ in listed)
    for heading in HEADINGS:
        if heading in rows:
            width = longest if command.is_grouped else max(len(name) for name, _ in rows[heading])
            yield _panel(rows[heading], say(HEADINGS[heading]), min(width, OUT.width * 2 // 5))
    if short:
        listed = _rows(command, ctx, say, short=False)
        count = sum(len(listed[heading]) for heading in listed if heading != "arguments")
        yield Padding(_marked(str, say(HEADINGS["rest"]).format(count, f"{ctx.command_path} --help-all")), (0, 1))
    examples = (command.epilog or "").partition("\n\n")[0] if short else command.epilog or ""
    yield Padding(_marked(str, "\n".join(_line(line, say) for line in examples.split("\n") if line)), 1)


def _rows(command: Any, ctx: click.Context, say: Say, short: bool) -> dict[str, list[tuple[str, RenderableType]]]:
    """Return what stands below each heading: names and their help."""
    found: dict[str, list[tuple[str, RenderableType]]] = {}
    for param in command.get_params(ctx):
        group, name = "arguments", param.human_readable_name
        if isinstance(param, click.Option):
            group = getattr(param, "group", "") if command.is_grouped else "options"
            name = ", ".join(param.opts) + (f" {param.metavar}" if param.metavar else "")
        if group or not short:
            found.setdefault(group or "options", []).append((name, _help(param, say, short)))
    for kind, options in completion.options_of(command.name).items() if command.is_grouped else ():
        for name, each in options.items():
            if not short or 0 < each.basic <= _USUAL:
                typed, text = name if kind == "pretraining" else name.replace("_", "-"), say(each.help)
                text = _CLAUSE.split(text)[0] if short else text
                found.setdefault(kind, []).append((f"--{typed}", _marked(str, messages.isolated(text))))
    heading = "commands"
    for name, text in command.summaries().items() if hasattr(command, "summaries") else ():
        heading = command.heads().get(name, heading)
        found.setdefault(heading, []).append((name, _marked(str, messages.isolated(_SENTENCE.split(say(text))[0]))))
    return found


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


def _panel(rows: list[tuple[str, RenderableType]], title: str, width: int) -> Panel:
    table = Table(show_header=False, expand=True, box=None, pad_edge=False)
    table.add_column(width=width, overflow="fold")
    table.add_column(ratio=10)
    for name, text in rows:
        table.add_row(_marked(str, name) if name.startswith(("-", "[")) else Text(name, "bold cyan"), text)
    return Panel(table, border_style="dim", title=title, title_align="left")


def _help(param: Any, say: Say, short: bool) -> RenderableType:
    text = say(param.help or "")
    if short:
        return _marked(str, messages.isolated(_SENTENCE.split(text)[0]))
    found = [_marked(str, messages.isolated(text))]
    if param.required:
        found.append(Text(say(HEADINGS["required"]), "dim red"))
    elif not getattr(param, "is_flag", False) and param.default is not None and str(param.default).strip():
        found.append(Text(say(HEADINGS["default"]).format(param.default), "dim"))
    return Columns(found)
