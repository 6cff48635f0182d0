"""docs/commands.md: every command with its usage, options, examples and exit codes, read from the command line itself."""

import inspect
from collections.abc import Iterator
from typing import Any

import json_schemas

from foretrain.base.errors import ExitCode
from foretrain.cli import app
from foretrain.cli.command import Group

# Exit codes of a command besides 0, 1, 2 and 130, which all have.
CODES: dict[str, tuple[ExitCode, ...]] = {
    "plan": (ExitCode.CHECK_FAILED, ExitCode.ENVIRONMENT, ExitCode.DATA),
    "advise": (ExitCode.ENVIRONMENT, ExitCode.DATA),
    "train": (
        ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY, ExitCode.DIVERGED, ExitCode.DATA, ExitCode.DISK_FULL,
        ExitCode.STOPPED,
    ),
    "tune": (ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY, ExitCode.DATA, ExitCode.DISK_FULL),
    "runs": (ExitCode.ENVIRONMENT, ExitCode.DATA), "top": (ExitCode.ENVIRONMENT, ExitCode.DATA),
    "report": (ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.DISK_FULL),
    "compare": (ExitCode.ENVIRONMENT, ExitCode.DATA), "explain": (ExitCode.ENVIRONMENT, ExitCode.DATA),
    "watch": (ExitCode.ENVIRONMENT, ExitCode.DISK_FULL), "mfu": (ExitCode.ENVIRONMENT,),
    "calibrate": (ExitCode.ENVIRONMENT,), "mcp": (ExitCode.ENVIRONMENT,),
    "verify": (ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.DISK_FULL, ExitCode.STOPPED),
    "sample": (ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY, ExitCode.DATA),
    "chat": (ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY, ExitCode.DATA),
    "export": (ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.DISK_FULL),
    "eval": (ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY, ExitCode.DATA, ExitCode.DISK_FULL),
    "prepare": (ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.DISK_FULL, ExitCode.STOPPED),
    "serve": (ExitCode.ENVIRONMENT, ExitCode.DATA),
    "demo": (ExitCode.ENVIRONMENT, ExitCode.DISK_FULL, ExitCode.STOPPED),
    "data": (ExitCode.ENVIRONMENT, ExitCode.DATA),
}  # fmt: skip
MEANINGS = {
    "DONE": "done",
    "INTERNAL": "internal error: a bug in foretrain; the message names the file with the details",
    "USAGE": "bad usage or configuration",
    "CHECK_FAILED": "`--check`: it does not fit, may not fit, does not run on this card, or is over budget",
    "ENVIRONMENT": "something is missing on this machine: torch, a card, a package, rights to a file, a writable folder",
    "OUT_OF_MEMORY": "out of memory",
    "DIVERGED": "the run diverged: the loss or the weights are not finite, or the training loss ends far above its start or "
    "its best; checkpoints are intact",
    "DATA": "data, a run or a checkpoint is missing or damaged",
    "DISK_FULL": "the disk is full, or the system allows no more writing; earlier checkpoints are intact",
    "STOPPED": "stopped by a signal, the state is saved; `--resume auto` continues",
    "INTERRUPTED": "interrupted: a second Ctrl-C, or a signal that ends a command with nothing to save; earlier saves are intact",
}
ALWAYS = (ExitCode.DONE, ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.INTERRUPTED)


def commands(group: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('plan', its command), ('data info', …) …, in the order of --help, without groups."""
    for name, command in (group or app).members().items():
        if isinstance(command, Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def reference() -> str:
    parts = [_contents()]
    for name, command in commands():
        parts += [f"## {name}", _summary(command), f"```text\n{usage(name, command)}\n```", _options(command)]
        if shown := examples(command):
            listed = "\n".join(_with_comment(line) for line in shown)
            parts.append(f"<!-- not run: these name files of yours -->\n```sh\n{listed}\n```")
        parts.append(_ending(name))
    return "\n\n".join(part for part in parts if part)


def _contents() -> str:
    rows = [f"| [{name}](#{name.replace(' ', '-')}) | {_cell(_summary(command))} |" for name, command in commands()]
    return "\n".join(["| command | what it answers |", "| --- | --- |", *rows])


def _summary(command: Any) -> str:
    return inspect.cleandoc(command.help or "").replace("\n", " ")


def is_option(param: Any) -> bool:
    return param.opts[0].startswith("-")


def usage(name: str, command: Any) -> str:
    words = []
    for param in command.params:
        if not is_option(param):
            word = param.metavar or param.name.upper()
            many = param.nargs == -1 and "..." not in word
            word = f"{word}..." if many else word
            words.append(word if param.required or word.startswith("[") else f"[{word}]")
    options = " [OPTIONS]" if any(is_option(param) for param in command.params) else ""
    return " ".join([f"foretrain {name}", *words]) + options


def _options(command: Any) -> str:
    rows = []
    for param in command.params:
        if getattr(param, "hidden", False) or not (param.help or is_option(param)):
            continue
        rows.append(f"| {_names(param)} | {_cell(param.help)}{_default(param)} |")
    return "\n".join(["| option | what |", "| --- | --- |", *rows]) if rows else ""


def _names(param: Any) -> str:
    """Return `--gpu`, `--price RATE`, `--fused` `--no-fused`, or the name of an argument."""
    if not is_option(param):
        return f"`{param.metavar or param.name.upper()}`"
    value = f" {param.metavar}" if param.metavar else ""
    return " ".join(f"`{name}{value}`" for name in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    if param.required:
        return " Required."
    value = param.default
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f" Default: `{value}`."


def _cell(text: str | None) -> str:
    return (text or "").replace("\n", " ").replace("|", "\\|").replace("[CONFIG]", "CONFIG")


def examples(command: Any) -> list[str]:
    """Return the example lines of --help."""
    lines = [line.strip() for line in inspect.cleandoc(command.epilog or "").splitlines()]
    return [line for line in lines if line.startswith("foretrain ")]


def _with_comment(line: str) -> str:
    """Turn the brackets behind an example into a comment of the shell."""
    call, gap, remark = line.partition("   (")
    return f"{call}   # {remark.removesuffix(')')}" if gap else line


def _ending(name: str) -> str:
    codes = sorted({*ALWAYS, *CODES.get(name.split()[0], ())})
    listed = ", ".join(str(int(code)) for code in codes)
    made = [key for key, output in json_schemas.OUTPUTS.items() if name in map(_command_of, output.command.split(", "))]
    links = ", ".join(f"[{key}](schemas/{json_schemas.path_of(key).name})" for key in made)
    return f"[Exit codes](schemas.md#exit-codes): {listed}." + (f" `--json` prints {links}." if links else "")


def _command_of(command: str) -> str:
    return " ".join(word for word in command.split() if word.islower() and word.isalpha())
