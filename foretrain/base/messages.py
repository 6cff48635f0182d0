"""Texts by id: `say("error.data.too_short", tokens=12)`. All sentences live in locales/*.toml.

Below the edge the product passes ids and numbers; a sentence is made when somebody reads it. A placeholder may
name a format of `units`: {size:bytes}, {seconds:duration}, {share:percent}, {n:count}, {n:flops}, {x:rate}; or be a
noun and its plural: {n:step|steps}.
They are said in the language that is spoken here and now (`languages`), and in English where it lacks one.
"""

import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretrain.base import bidi, languages, units
from foretrain.base.languages import texts


class _End(float):
    """One end of a range in seconds, which is said in the unit of `of`, other seconds of the same text."""

    of: float = 0.0

    @classmethod
    def both(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a text with `low` and `high` in one unit: that of what is expected, else of the higher end."""
        if values["high"] > 1000 * values["low"] > 0:  # as of steps of which one stood still: no unit serves both
            return values
        of = next((values[name] for name in ("expected", "median", "predicted") if name in values), values["high"])
        found = {name: cls(values[name]) for name in ("low", "high")}
        for end in found.values():
            end.of = of
        return {**values, **found}

    def text(self) -> str:
        size, unit = units.duration_unit(self.of)
        number = self / size
        plain = f"{number:.3g}" if size <= 1 and number < 1000 else units.grouped(number, 1)
        return f"{units.format_rough(number) if number and float(plain.replace(',', '')) == 0 else plain} {unit}"


def _duration(seconds: float) -> str:
    """As `units` has it; what is no symbol in it is a text."""
    text = seconds.text() if isinstance(seconds, _End) else units.format_duration(seconds)
    number, _, unit = text.partition(" ")
    return say("unit.days", days=number) if unit == "days" else say("unit.unknown") if text == "unknown" else text


def _duration_span(seconds: units.Span) -> str:
    """'54.8 h (41.1–84.4)': the expected time, and its range in the same unit."""
    low, expected, high = seconds
    text = _duration(expected)
    size, _ = units.duration_unit(expected)
    decimals = 1 if size > 1 else max(0, 2 - math.floor(math.log10(expected / size))) if expected > 0 else 0
    ends = [units.grouped(end / size, decimals) for end in (low, high)]
    return f"{text} ({ends[0]}–{ends[1]})" if ends[0] != ends[1] else text


def _rough_duration_span(seconds: units.Span) -> str:
    """'55 h (41-84)': two digits that tell, to be pasted."""
    low, expected, high = seconds
    size, unit = units.duration_unit(expected)
    middle, *ends = (units.format_rough(each / size) for each in (expected, low, high))
    text = say("unit.days", days=middle) if unit == "days" else f"{middle} {unit}"
    return f"{text} ({ends[0]}-{ends[1]})" if ends[0] != ends[1] else text


def _money(amount: float) -> str:
    return say("unit.under", amount=units.CENT) if 0 < abs(amount) < units.CENT else units.format_money(amount)


def _money_span(amounts: tuple[float, float, float, str]) -> str:
    """'3.19 EUR (1.85–5.30)': low, expected and high amount, and the currency."""
    low, expected, high, currency = amounts
    text = f"{_money(expected)} {currency}".rstrip()
    ends = [units.format_money(end) for end in (low, high)]
    return text if ends[0] == ends[1] or 0 < expected < units.CENT else f"{text} ({ends[0]}–{ends[1]})"


def _rough_money(amount: float) -> str:
    return _money(amount) if amount < units.CENT else units.format_rough(amount)


FORMATS = {
    "bytes": units.format_bytes,
    "bytes_range": units.format_bytes_range,
    "duration": _duration,
    "percent": units.format_percent,
    "signed_percent": units.format_signed_percent,
    "small_percent": units.format_small_percent,
    "small_signed_percent": units.format_small_signed_percent,
    "count": units.format_count,
    "flops": units.format_flops,
    "rate": units.format_flop_rate,
    "energy": units.format_energy,
    "money": _money,
    "bytes_span": units.format_bytes_span,
    "duration_span": _duration_span,
    "money_span": _money_span,
    "rough_duration_span": _rough_duration_span,
    "rough_money": _rough_money,
    "rough_gib": lambda size: units.format_rough(size / units.GIB),
    "gib": lambda size: f"{size / units.GIB:,.2f}",
    "mass": units.format_mass,
    "digits4": units.format_digits4,
    "factor": units.format_factor,
    "number": units.format_number,
}


def listed(words: Iterable[object]) -> str:
    """'a, b, c', with the language's comma."""
    return say("list.comma").join(map(str, words))


def format_value(value: Any, spec: str) -> str:
    """A value in one of the formats above, else as Python formats it; a list is joined by commas."""
    if spec in FORMATS:
        return bidi.isolated(FORMATS[spec](value))
    if "|" in spec:  # the noun of a count: {count:step|steps}
        one, several = spec.split("|")
        return one if value == 1 else several
    if isinstance(value, list | tuple):
        return listed(value)
    return format(value, spec)


_LOW_TO_HIGH = r"\{(?P<of>\w*)low:(?P<how>[^{}]*)\}[^(){}]*\{(?P=of)high:(?P=how)\}"
_RANGE = re.compile(rf" ?\([^(){{}}]*{_LOW_TO_HIGH}[^(){{}}]*\)")  # ' ({low:duration} to {high:duration})'
_ENDS = re.compile(_LOW_TO_HIGH.replace("[^(){}]*", " – "))  # '{low:duration} – {high:duration}'


def _without_equal_ends(text: str, values: Mapping[str, Any]) -> str:
    """The text without a range in brackets whose two ends print the same; of one without brackets, one end."""

    def same(found: re.Match[str]) -> bool:
        low, high = (format_value(values[f"{found['of']}{end}"], found["how"]) for end in ("low", "high"))
        return low == high

    text = _RANGE.sub(lambda found: "" if same(found) else found[0], text)
    return _ENDS.sub(lambda found: f"{{{found['of']}low:{found['how']}}}" if same(found) else found[0], text)


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
    text = texts(languages.current().id)[id]
    if "{low:duration}" in text and "{high:duration}" in text and math.isfinite(values["high"]):
        values = _End.both(values)
    if "high:" in text:
        text = _without_equal_ends(text, values)
    return bidi.isolated(_formatter.vformat(text, (), values))


def has(id: str, lang: str = languages.ENGLISH) -> bool:
    """Whether the language, or English for it, has a text for this id."""
    return id in texts(lang)


def knob_help(name: str, english: str, of: str = "knob") -> str:
    """The help of a knob. Its English is that of the knob itself, in config/options.py; `of` finetune_knob: of one of
    config/finetune/options.py."""
    return bidi.isolated(texts(languages.current().id).get(f"{of}.{name}", english))


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
