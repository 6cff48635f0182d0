"""Configs as files: nanoGPT's own with changed values in their lines (read with `ast`, never run), short TOML."""

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.files import not_written
from foretrain.base.messages import printable
from foretrain.config import nanogpt_file
from foretrain.config.families import family_of
from foretrain.config.option import GROUPS
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.config.resolve import LEFT_OUT, toml_value

_LINE_END = re.compile(rb"\r\n|\r|\n")


def write_text(text: str, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise not_written(path, error) from None


def short_toml(config: RunConfig, origin: Sequence[str] = (), before: Mapping[str, str] | None = None) -> str:
    """Return the options that differ from their defaults, by group. `origin`: comments above; `before`: behind."""
    written = {name for name, option in OPTIONS.items() if getattr(config, name) != option.default}
    written |= {*family_of(config).sets, *family_of(config).rates}
    if config.init_from != "scratch":
        written |= {*named(lambda option: option.from_weights)}  # so that even a default has to be said
    changed = before or {}
    lines = comments(origin)
    for group in GROUPS:
        members = [name for name, option in OPTIONS.items() if option.group == group and name in {*written, *changed}]
        if members:
            lines += ["", f"[{group}]"]
        for name in members:
            comment = f"  {comments([changed[name]])[0]}" if name in changed else ""
            lines.append(f"{name} = {toml_value(getattr(config, name))}{comment}")
    return "\n".join([*lines, ""]).lstrip("\n")


def comments(texts: Sequence[str]) -> list[str]:
    return ["# " + " ".join(printable(text).split()) for text in texts]


def nanogpt_text(text: str, changes: Mapping[str, Any], origin: Sequence[str]) -> str:
    """Change values in a nanoGPT config file's text: in their lines, else at the end; all at the end where a line
    computes another value from one."""
    here = _replaced(text, {name: value for name, value in changes.items() if name in _values(ast.parse(text))})
    wanted = {**_settings(text), **changes}
    found = _settings(here)
    at_end = {name: value for name, value in changes.items() if name not in found}
    if {**found, **at_end} != wanted:
        here, at_end = text, dict(changes)
    lines = [f"{name} = {value!r}" for name, value in at_end.items()]
    body = here if not lines or here.endswith("\n") or not here else here + "\n"
    return "\n".join([*comments(origin), ""]) + body + "".join(line + "\n" for line in lines)


def _settings(text: str) -> dict[str, Any]:
    return {s.key: s.value for s in nanogpt_file.parse(text, "config.py", set(OPTIONS), LEFT_OUT).settings}


def _values(tree: ast.Module) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found


def _replaced(text: str, changes: Mapping[str, Any]) -> str:
    data = text.encode()
    starts = [0, *(match.end() for match in _LINE_END.finditer(data))]
    values = _values(ast.parse(text))
    spans = []
    for name, value in changes.items():
        node = values[name]
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        spans.append((starts[node.lineno - 1] + node.col_offset, end, repr(value).encode()))
    for start, end, new in sorted(spans, reverse=True):
        data = data[:start] + new + data[end:]
    return data.decode()


def check_writable(path: Path, endings: Sequence[str] = (".toml",)) -> None:
    """Raise UserError where no such file can be written. One that is there is never written over."""
    if path.suffix not in endings:
        reason = f"its name must end in {' or '.join(endings)}"
        raise UserError("usage.cannot_write_file", path=str(path), reason=reason)
    if not path.parent.is_dir():
        raise UserError("usage.cannot_write_file", path=str(path), reason="its folder is not there")
    if path.exists():
        raise UserError("usage.cannot_write_file", path=str(path), reason="it is there already; give another name")
