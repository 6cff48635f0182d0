"""What the user typed about one source: `[NAME=]PATH[+CONFIG][+KEY=VALUE]…`, taken apart."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes
from foretrain.config.hub.source import model_named
from foretrain.config.presets import preset_named
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.hardware.devices import device_named
from foretrain.runs import state as label

_NAMED = re.compile(r"([^=+/\\]{1,40})=(.+)", re.DOTALL)
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson")
OWN_KEYS = ("gpu", "used_by_others", "bytes_per_token", "tokens_per_step", "run")


@dataclass(frozen=True)
class SourceRequest:
    """One source. `words`: its config; `own`: keys of the command; `tables`: exports; `columns`: role -> column."""

    path: str
    label: str = ""
    words: tuple[str, ...] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Path, ...] = ()
    gpu: Gpu | None = None
    used_by_others_bytes: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        path = Path(self.path)
        if self.label or not path.is_dir():
            return self.label or (path.stem if _exists(self.path) else self.path)
        return label.read_label(path).title or path.resolve().name

    @cached_property
    def head(self) -> bytes:
        return first_bytes(Path(self.path), 4096)

    @cached_property
    def resolved(self) -> ResolvedConfig | None:
        """Return the config that belongs to it; None where none was given. Raises ConfigError."""
        return resolve(self.words) if self.words else None

    @property
    def is_model(self) -> bool:
        return not _exists(self.path) and preset_named(self.path) is None and _is_model(self.path)

    @property
    def card(self) -> Gpu | None:
        return device_named(self.own["gpu"]) if "gpu" in self.own else self.gpu

    @property
    def held_bytes(self) -> int:
        if "used_by_others" not in self.own:
            return self.used_by_others_bytes
        return stated_bytes(self.own["used_by_others"], "used_by_others")

    def number(self, key: str, least: float, most: float) -> float | None:
        """Return the number under a key of `own`. Raises UserError for what is none."""
        if key not in self.own:
            return None
        try:
            value = float(self.own[key].replace("_", "").replace(",", ""))
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise UserError("usage.source_number", key=key, value=self.own[key][:40], least=least, most=most)
        return value


def card_named(name: str | None) -> Gpu | None:
    try:
        return device_named(name) if name else None
    except UserError:
        return None


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _is_model(path: str) -> bool:
    return path.startswith("hf:") or model_named(path) is not None


def take_apart(word: str) -> SourceRequest:
    """Split a source into its parts. An existing path is taken as it is, whatever signs it has. Raises UserError."""
    label, rest = "", word
    if not _exists(word):
        named = _NAMED.fullmatch(word)
        if named and named[1].strip() and not named[1].lstrip().startswith("-"):
            label, rest = named[1].strip(), named[2]
    parts = rest.split("+")
    for count in range(len(parts), 0, -1):
        path = "+".join(parts[:count])
        if _exists(path) or preset_named(path) or _is_model(path):
            return _with_extras(word, path, label, parts[count:])
    path = parts[0]
    if Path(path).suffix in (".toml", ".py"):
        return _with_extras(word, path, label, parts[1:])  # the config reader reports what is wrong
    raise UserError("data.no_source", path=path[:200])


def _with_extras(word: str, path: str, label: str, extras: list[str]) -> SourceRequest:
    words, own, tables = [], {}, []
    for extra in extras:
        key, equals, value = extra.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if equals and name in OWN_KEYS:
            own[name] = value
        elif equals:
            words.append(f"--{key.lstrip('-')}={value}")
        elif Path(extra).suffix in _TABLES:
            tables.append(Path(extra))
        elif extra:
            words.append(extra)
        else:
            raise UserError("usage.source_empty_part", word=word[:200])
    return SourceRequest(path=path, label=label, words=tuple(words), own=own, tables=tuple(tables))
