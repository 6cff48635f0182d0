"""Texts by id: `say("error.data.too_short", tokens=12)`. All sentences live in locales/*.toml.

Below the edge the product passes ids and numbers; a sentence is made when somebody reads it. A placeholder may
name a format of `units`: {size:bytes}, {seconds:duration}, {share:percent}, {n:count}, {n:flops}, {x:rate}.
They are said in the language that is spoken here and now (`languages`), and in English where it lacks one.
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretrain import bidi, languages, units
from foretrain.languages import texts


def _duration(seconds: float) -> str:
    """As `units` has it; what is no symbol in it is a text."""
    text = units.format_duration(seconds)
    number, _, unit = text.partition(" ")
    return say("unit.days", days=number) if unit == "days" else say("unit.unknown") if text == "unknown" else text


_FORMATS = {
    "bytes": units.format_bytes,
    "bytes_range": units.format_bytes_range,
    "duration": _duration,
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


def listed(words: Iterable[object]) -> str:
    """'a, b, c', with the language's comma."""
    return say("list.comma").join(map(str, words))


def format_value(value: Any, spec: str) -> str:
    """A value in one of the formats above, else as Python formats it; a list is joined by commas."""
    if spec in _FORMATS:
        return bidi.isolated(_FORMATS[spec](value))
    if isinstance(value, list | tuple):
        return listed(value)
    return format(value, spec)


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return bidi.value(format_value(value, format_spec))

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)]


_formatter = _Formatter()


def printable(text: str) -> str:
    """The text without control characters, which could command a terminal. Names and samples are not ours.

    Of the marks of direction only those pass that `bidi` sets itself, and only where it sets them.
    """
    passing = "\n\t" + bidi.MARKS if bidi.runs_rightwards() else "\n\t"
    return "".join(c if c in passing or c.isprintable() else "\ufffd" for c in text)


def say(id: str, lang: str | None = None, /, **values: Any) -> str:
    """The text of `id` with its values put in, in the language that is spoken, or in `lang`.

    Raises KeyError for an unknown id or a missing value.
    """
    if lang is not None:
        with languages.speaking(lang):
            return say(id, **values)
    return bidi.isolated(_formatter.vformat(texts(languages.current().id)[id], (), values))


def has(id: str, lang: str = languages.ENGLISH) -> bool:
    """Whether the language, or English for it, has a text for this id."""
    return id in texts(lang)


def knob_help(name: str, english: str) -> str:
    """The help of a knob. Its English is that of the knob itself, in config.py."""
    return bidi.isolated(texts(languages.current().id).get(f"knob.{name}", english))


def knob_unit(unit: str) -> str:
    """The unit of a knob, such as blocks or g/kWh."""
    return texts(languages.current().id).get(f"knob_unit.{unit}", unit)


_SOURCES = {
    "estimated": "estimated", "traced": "traced", "calibrated": "calibrated", "measured": "measured",
    "measured (log)": "log",
}  # fmt: skip


def source_name(source: Any) -> Any:
    """How a record names where a figure is from, as a text; what is no such name stays as it is."""
    return say(f"source_name.{_SOURCES[source]}") if isinstance(source, str) and source in _SOURCES else source
