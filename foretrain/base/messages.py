"""Texts by id: `say("error.data.too_short", tokens=12)`, from locales/*.toml in the thread's language, else English.
{size:bytes} names a format of `units`, {n:step|steps} is a noun and its plural."""

import json
import math
import re
import string
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from foretrain.base import units

# A line: a table's header, a text, a comment, or nothing.
_PLAIN = r'[^"\\\x00-\x1f\x7f]*'
_LINE = re.compile(
    rf'^(?:\[([A-Za-z0-9_.-]+)\]|(?:"([^"\\\n]+)"|([A-Za-z0-9_-]+)) = "({_PLAIN}(?:\\["\\nt]{_PLAIN})*)"|#.*|[ \t]*)$',
    re.MULTILINE,
)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read(text: str) -> dict[str, Any]:
    first = text.find("\n[", text.find("[") + 1) + 1
    found = _texts(text[first:])
    return flat(tomllib.loads(text)) if found is None else flat(tomllib.loads(text[:first])) | found


def _texts(text: str) -> dict[str, str] | None:
    lines = _LINE.findall(text)
    if len(lines) != text.count("\n") + 1:
        return None
    found, prefix = {}, ""
    for header, quoted, bare, value in lines:
        if header:
            prefix = f"{header}."
        elif quoted or bare:
            found[prefix + (quoted or bare)] = json.loads(f'"{value}"') if "\\" in value else value
    return found


ENGLISH = "en"
_FOLDER = resources.files("foretrain") / "locales"
_ID = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*")


@dataclass(frozen=True)
class Language:
    id: str
    name: str
    direction: str  # ltr or rtl


@cache
def ids_of() -> tuple[str, ...]:
    names = (file.name for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    found = {id for name in names if _ID.fullmatch(id := name.removesuffix(".toml"))}
    return (ENGLISH, *sorted(found - {ENGLISH}))


@cache
def file_of(id: str) -> dict[str, Any]:
    if id not in ids_of():
        raise KeyError(id)
    return read((_FOLDER / f"{id}.toml").read_text("utf-8"))


def texts_of(id: str) -> dict[str, str]:
    return {key: text for key, text in file_of(id).items() if not key.startswith("language.")}


@cache
def table_of(id: str) -> Language:
    return Language(id, file_of(id).get("language.name", id), file_of(id).get("language.direction", "ltr"))


def languages() -> dict[str, Language]:
    return {id: table_of(id) for id in ids_of()}


@cache
def texts(id: str = ENGLISH) -> dict[str, str]:
    return {**texts_of(ENGLISH), **texts_of(id)}


_process = ENGLISH
_here: ContextVar[str | None] = ContextVar("language", default=None)


def current() -> Language:
    return table_of(_here.get() or _process)


def set_language(id: str) -> str:
    global _process  # one process has one source, in every thread of it
    before, _process = _process, table_of(id).id
    return before


@contextmanager
def speaking(id: str) -> Iterator[None]:
    token = _here.set(table_of(id).id)
    try:
        yield
    finally:
        _here.reset(token)


def matching(word: str) -> str | None:
    tag = re.split(r"[.@]", word.strip(), maxsplit=1)[0].replace("_", "-").lower()
    while tag and tag not in ids_of():
        tag = tag.rpartition("-")[0]
    return tag or None


def preferred(accepted: str) -> str | None:
    wishes = []
    for part in accepted[:1000].split(",")[:50]:
        word, _, quality = part.partition(";")
        found = re.fullmatch(r"\s*q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", quality)
        weight = 1.0 if not quality else float(found[1]) if found else 0.0
        id = matching(word)
        if id is not None and weight > 0:
            wishes.append((-weight, len(wishes), id))
    return min(wishes)[2] if wishes else None


# Latin words and numbers inside lines from right to left. Signs take their direction from their neighbours: in Arabic
# "12.5 GiB" would come out as "GiB 12.5", and "--lang" as "lang--". So each run of Latin letters, digits and signs gets
# Unicode's isolates (LRI … PDI, UAX #9), which have no width and which terminals, browsers and canvases obey.

LRI, RLI, FSI, PDI = "\u2066", "\u2067", "\u2068", "\u2069"
MARKS = LRI + RLI + FSI + PDI

_RTL = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc"
_HAS_RTL = re.compile(f"[{_RTL}]")
_HAS_LATIN = re.compile(r"[A-Za-z0-9\u00b5-\u02af\u0370-\u03ff\u0900-\u097f]|\{")
_RUN = re.compile(f"(?:(?! · )[^{_RTL}{MARKS}])+")
_WITHOUT_BLANKS = re.compile(r"\S(?:.*\S)?")
# Signs at the ends of a run belong to the sentence around it; a "." before a letter begins a name like .toml.
_BEFORE = re.compile(r"(?:[\s,:;!?)\]»”=–—·|]|\.(?!\w))*")
_AFTER = " \t.,:;!?([«“=–—·|"


def runs_rightwards() -> bool:
    return current().direction == "rtl"


def without_marks(text: str) -> str:
    return text.translate({ord(mark): None for mark in MARKS})


def isolated(text: str) -> str:
    """Isolate Latin runs and `{names}` of a text from right to left; twice changes nothing."""
    if not runs_rightwards():
        return text
    lines = text.split("\n")
    if len(lines) > 1:  # among several, a line without such letters is for copying: it gets no marks
        return "\n".join(_line(line) if _HAS_RTL.search(line) else without_marks(line) for line in lines)
    return _line(text)


def isolated_value(text: str) -> str:
    """Isolate a value that has letters from right to left; `isolated` does the others."""
    if not runs_rightwards():
        return text
    if not _HAS_RTL.search(text):
        return without_marks(text)
    return text if "\n" in text else FSI + text + PDI


def _line(line: str) -> str:
    if not _HAS_RTL.search(line):
        return _WITHOUT_BLANKS.sub(lambda match: _marked(match[0]), without_marks(line), count=1)
    return "".join(part if depth else _RUN.sub(_run, part) for part, depth in _parts(line))


def _parts(line: str) -> list[tuple[str, bool]]:
    parts, depth, begin = [], 0, 0
    for at, sign in enumerate(line):
        if sign in LRI + RLI + FSI:
            if depth == 0:
                parts.append((line[begin:at], False))
                begin = at
            depth += 1
        elif sign == PDI and depth:
            depth -= 1
            if depth == 0:
                parts.append((line[begin : at + 1], True))
                begin = at + 1
    rest = line[begin:]
    return [*parts, (rest + PDI * depth, depth > 0)]


def _run(match: re.Match[str]) -> str:
    text = match[0]
    begin = _BEFORE.match(text).end()  # type: ignore[union-attr]  # it matches nothing at least
    end = max(begin, len(text.rstrip(_AFTER).removesuffix(" +").rstrip(_AFTER)))
    run = text[begin:end]
    if run.endswith(")") and run.count(")") > run.count("("):  # opened in the other script
        end -= 1
    if run.startswith("(") and run.count("(") > run.count(")"):
        begin += 1
    return text[:begin] + _marked(text[begin:end]) + text[end:]


def _marked(run: str) -> str:
    if not _HAS_LATIN.search(run) or run.isdecimal():
        return run
    return (FSI if "{" in run else LRI) + run + PDI


class _RangeEnd(float):
    """One end of a range in seconds, in the unit of `of`."""

    of: float = 0.0

    @classmethod
    def both(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Use one unit for `low` and `high`: that of `expected`, else of the higher end."""
        if values["high"] > 1000 * values["low"] > 0:  # one of the steps stood still: no unit serves both
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
    text = seconds.text() if isinstance(seconds, _RangeEnd) else units.format_duration(seconds)
    number, _, unit = text.partition(" ")
    return say("unit.days", days=number) if unit == "days" else say("unit.unknown") if text == "unknown" else text


def _duration_span(seconds: units.Span) -> str:
    """Format '54.8 h (41.1–84.4)': the expected time, and its range in the same unit."""
    low, expected, high = seconds
    text = _duration(expected)
    size, _ = units.duration_unit(expected)
    decimals = 1 if size > 1 else max(0, 2 - math.floor(math.log10(expected / size))) if expected > 0 else 0
    ends = [units.grouped(end / size, decimals) for end in (low, high)]
    return f"{text} ({ends[0]}–{ends[1]})" if ends[0] != ends[1] else text


def _rough_duration_span(seconds: units.Span) -> str:
    """Format '55 h (41-84)': two significant digits, to be pasted."""
    low, expected, high = seconds
    size, unit = units.duration_unit(expected)
    middle, *ends = (units.format_rough(each / size) for each in (expected, low, high))
    text = say("unit.days", days=middle) if unit == "days" else f"{middle} {unit}"
    return f"{text} ({ends[0]}-{ends[1]})" if ends[0] != ends[1] else text


def _money(amount: float) -> str:
    return say("unit.under", amount=units.CENT) if 0 < abs(amount) < units.CENT else units.format_money(amount)


def _money_span(amounts: tuple[float, float, float, str]) -> str:
    """Format '3.19 EUR (1.85–5.30)': low, expected and high amount, and the currency."""
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
    return say("list.comma").join(map(str, words))


def format_value(value: Any, spec: str) -> str:
    if spec in FORMATS:
        return isolated(FORMATS[spec](value))
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
    """Drop a range in brackets whose two ends print the same; without brackets keep one end."""

    def same(found: re.Match[str]) -> bool:
        low, high = (format_value(values[f"{found['of']}{end}"], found["how"]) for end in ("low", "high"))
        return low == high

    text = _RANGE.sub(lambda found: "" if same(found) else found[0], text)
    return _ENDS.sub(lambda found: f"{{{found['of']}low:{found['how']}}}" if same(found) else found[0], text)


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return isolated_value(format_value(value, format_spec))

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)]


_formatter = _Formatter()


def printable(text: str) -> str:
    """Replace control characters, which could command a terminal; only this module's direction marks pass."""
    passing = "\n\t" + MARKS if runs_rightwards() else "\n\t"
    return "".join(c if c in passing or c.isprintable() else "\ufffd" for c in text)


def say(id: str, lang: str | None = None, /, **values: Any) -> str:
    """Return the text of `id` with its values, in `lang` or the thread's language. Raises KeyError."""
    if lang is not None:
        with speaking(lang):
            return say(id, **values)
    text = texts(current().id)[id]
    if "{low:duration}" in text and "{high:duration}" in text and math.isfinite(values["high"]):
        values = _RangeEnd.both(values)
    if "high:" in text:
        text = _without_equal_ends(text, values)
    return isolated(_formatter.vformat(text, (), values))


def has(id: str, lang: str = ENGLISH) -> bool:
    return id in texts(lang)


def option_help(name: str, english: str, of: str = "knob") -> str:
    return isolated(texts(current().id).get(f"{of}.{name}", english))


def option_unit(unit: str) -> str:
    return texts(current().id).get(f"knob_unit.{unit}", unit)


_SOURCES = {
    "estimated": "estimated", "traced": "traced", "calibrated": "calibrated", "measured": "measured",
    "measured (log)": "log",
}  # fmt: skip


def source_name(source: Any) -> Any:
    return say(f"source_name.{_SOURCES[source]}") if isinstance(source, str) and source in _SOURCES else source
