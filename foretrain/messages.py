"""Texts by id: `say("error.data.too_short", tokens=12)`. All sentences live in locales/*.toml.

Below the edge the product passes ids and numbers; a sentence is made when somebody reads it. A placeholder may
name a format of `units`: {size:bytes}, {seconds:duration}, {share:percent}, {n:count}, {n:flops}, {x:rate}.
"""

import string
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from foretrain import units

_FORMATS = {
    "bytes": units.format_bytes,
    "bytes_range": units.format_bytes_range,
    "duration": units.format_duration,
    "percent": units.format_percent,
    "signed_percent": units.format_signed_percent,
    "count": units.format_count,
    "flops": units.format_flops,
    "rate": units.format_flop_rate,
    "energy": units.format_energy,
    "money": units.format_money,
    "mass": units.format_mass,
    "digits4": units.format_digits4,
    "number": units.format_number,
}


def format_value(value: Any, spec: str) -> str:
    """A value in one of the formats above, else as Python formats it; a list is joined by commas."""
    if spec in _FORMATS:
        return _FORMATS[spec](value)
    if isinstance(value, list | tuple):
        return ", ".join(str(v) for v in value)
    return format(value, spec)


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return format_value(value, format_spec)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)]


_formatter = _Formatter()


@cache
def texts(lang: str = "en") -> dict[str, str]:
    """All texts of a language as {dotted id: template}."""
    raw = tomllib.loads((resources.files("foretrain") / "locales" / f"{lang}.toml").read_text("utf-8"))
    flat: dict[str, str] = {}

    def walk(prefix: str, table: dict[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = value

    walk("", raw)
    return flat


def printable(text: str) -> str:
    """The text without control characters, which could command a terminal. Names and samples are not ours."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def say(id: str, lang: str = "en", /, **values: Any) -> str:
    """The text of `id` with its values put in. Raises KeyError for an unknown id or a missing value."""
    return _formatter.vformat(texts(lang)[id], (), values)


def has(id: str, lang: str = "en") -> bool:
    """Whether the language has a text for this id."""
    return id in texts(lang)
