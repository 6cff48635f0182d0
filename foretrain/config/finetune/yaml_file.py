"""The table of a YAML or JSON text, read as data: no tags, no bombs, no duplicate keys, a bounded size and depth."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.files import read_bytes
from foretrain.config.checks import value_as_written

TABLES = (".yaml", ".yml", ".json")  # endings of the files
MAX_BYTES = 2**18  # the longest recipes have some ten kilobytes
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{each}" for each in ("str", "int", "float", "bool", "null", "seq", "map"))
MAX_NOTEBOOK_BYTES = 2**24  # with its outputs
_MAGIC = re.compile(r"^([ \t]*)[%!](?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_OTHER_CELL = re.compile(r"\s*%%(?!capture|time)\w+")  # of a shell, of HTML, a file to write
MAX_DEPTH, MAX_NODES = 32, 100_000  # nodes: each alias counted with all that it stands for


def read_text_of(path: Path) -> str:
    """Return the UTF-8 text of a config of some kilobytes, or the Python of a notebook's cells. Raises UserError."""
    try:
        if path.suffix == ".ipynb":
            return notebook_code(read_bytes(path, MAX_NOTEBOOK_BYTES).decode("utf-8-sig"), str(path))
        return read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("config.finetune_not_text", path=str(path)) from None
    except OSError as error:
        raise UserError("config.cannot_read", path=str(path), reason=error.strerror or str(error)) from None


def notebook_code(text: str, source: str) -> str:
    """Return the code cells of a notebook, with `pass` where the shell or a magic is called."""
    try:
        cells = [each["source"] for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
        codes = [cell if isinstance(cell, str) else "".join(cell) for cell in cells]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError("config.finetune_not_python", source=source, reason="it is no notebook of Jupyter") from None
    python = [code for code in codes if not _OTHER_CELL.match(code)]
    return "\n".join(_MAGIC.sub(r"\1pass", code) for code in python)


def table_of(text: str, source: str) -> dict[str, Any]:
    """The table of a text, JSON where it begins with a brace, else YAML. Raises UserError."""
    if len(text) > MAX_BYTES:
        raise UserError("config.file_too_large", path=source, limit=MAX_BYTES)
    found = _json(text, source) if text.lstrip().startswith("{") else None
    if found is None:
        found = _Yaml(source).read(text)
    if not isinstance(found, dict):
        raise UserError("config.finetune_no_table", path=source)
    if not found:
        raise UserError("config.finetune_empty", path=source)
    return {str(key): value for key, value in found.items()}


def _json(text: str, source: str) -> Any:
    """The value of a JSON text; None where it is none, such as YAML in braces."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in found:
            _once(table, key, value, source)
            table[key] = value
        return table

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise UserError("config.finetune_deep", path=source, depth=MAX_DEPTH) from None
    except ValueError:
        return None


def _once(table: dict[Any, Any], key: Any, value: Any, source: str) -> None:
    """Raises UserError where a key already has another value."""
    if key in table and table[key] != value:
        raise UserError("config.finetune_twice", path=source, key=str(key)[:60])


def yaml_module() -> Any:
    """Return PyYAML. Raises UserError."""
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise UserError("environment.missing_package", package="pyyaml") from None


class _Yaml:
    """One YAML text, looked at before anything is made of it."""

    def __init__(self, source: str) -> None:
        self.source, self.yaml = source, yaml_module()

    def read(self, text: str) -> Any:
        try:
            self._look(text)
            return self.yaml.load(text, Loader=self._loader())
        except self.yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f"line {mark.line + 1}: " if mark else ""
            reason = getattr(error, "problem", None) or next(iter(str(error).splitlines()), "")
            raise UserError(
                "config.finetune_not_yaml", path=self.source, reason=value_as_written(f"{line}{reason}")
            ) from None
        except RecursionError:
            raise UserError("config.finetune_deep", path=self.source, depth=MAX_DEPTH) from None
        except (ValueError, OverflowError) as error:  # a date such as 2024-99-99
            raise UserError("config.finetune_not_yaml", path=self.source, reason=value_as_written(str(error))) from None

    def _look(self, text: str) -> None:
        """Refuse tags, depth and what aliases grow into, by the parser's events alone."""
        yaml, open_, sizes = self.yaml, [["", 0]], {}
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise UserError("config.finetune_bomb", path=self.source, most=MAX_NODES)
                open_[-1][1] += sizes[event.anchor]
            elif isinstance(event, yaml.NodeEvent):
                self._tag(event)
                if isinstance(event, yaml.ScalarEvent):
                    open_[-1][1] += 1
                    sizes[event.anchor] = 1
                else:
                    open_.append([event.anchor, 1])
                    if len(open_) > MAX_DEPTH:
                        raise UserError("config.finetune_deep", path=self.source, depth=MAX_DEPTH)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, size = open_.pop()
                sizes[anchor] = size
                open_[-1][1] += size
            if open_[-1][1] > MAX_NODES:
                raise UserError("config.finetune_bomb", path=self.source, most=MAX_NODES)

    def _tag(self, event: Any) -> None:
        if event.tag not in (None, "!", *_PLAIN_TAGS):
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise UserError(
                "config.finetune_tag", path=self.source, tag=value_as_written(tag), line=event.start_mark.line + 1
            )

    def _loader(self) -> Any:
        """A safe loader that names a key that stands twice."""
        source, base = self.source, self.yaml.SafeLoader

        def mapping(loader: Any, node: Any) -> dict[Any, Any]:
            seen: dict[Any, Any] = {}
            for key, value in node.value:
                if key.tag != "tag:yaml.org,2002:merge":
                    name = loader.construct_object(key, deep=True)
                    if not isinstance(name, str | int | float | bool | None):
                        raise UserError("config.finetune_key", path=source, line=key.start_mark.line + 1)
                    _once(seen, name, loader.construct_object(value, deep=True), source)
                    seen[name] = loader.construct_object(value, deep=True)
            loader.flatten_mapping(node)
            made = [[loader.construct_object(each, deep=True) for each in pair] for pair in node.value]
            return {**dict(made), **seen}

        kind = type("Loader", (base,), {})
        kind.add_constructor("tag:yaml.org,2002:map", mapping)
        return kind
