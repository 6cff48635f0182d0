"""Axes of a picture: marks with texts at several densities, where a value stands, how wide a text is. Linear axes have
steps of 1, 2, 5 or powers of two; logarithmic ones digits of each power."""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foretrain.base.messages import format_value, isolated
from foretrain.base.units import BYTE_UNITS, format_bytes
from foretrain.reports.document import Axis

Tick = tuple[float, str]
Density = list[Tick]  # the ticks of one density, upwards

COUNTS = (12, 8, 6, 4, 3, 2)  # how many steps an axis may have, the densest first
MOST = 24  # ticks of a density, which may reach beyond what is shown
MARGIN, ROOM = 0.3, 1.2  # of its length an axis may be longer than its values; where texts stand behind bars
CLOCK_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000
)  # fmt: skip
# On a logarithmic axis: which digits of a power are marked. Bytes go by powers of four.
DIGITS = {4: ((1, 2), (1,)), 10: ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))}
SPARSE = (2, 3, 4, 6)  # every so many powers, where even one digit of each has no room
SHORT_RATIO = 2.5  # between the ends of a logarithmic axis so short that even steps stand well
CLOCK_UNITS_S = ((1.0, 60.0), (60.0, 3600.0), (3600.0, 86400.0), (86400.0, math.inf))


def ticks(format: str, low: float, high: float, *, log: bool = False, beyond: float = MARGIN) -> list[Density]:
    """Return (value, text) from low to high and `beyond`, a list for each density, the densest first; a logarithmic
    axis leaves out what is not above 0; in a level no two texts are equal."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return []
    if log and high <= 0:
        return []
    low = low if low > 0 or not log else high / 1e3
    made = _logarithmic if log else _linear
    return _distinct(made(format, low, high, beyond)) or [[(low, _tick_text(format, low, high))]]


def _distinct(levels: Iterable[Density]) -> list[Density]:
    found: list[Density] = []
    for level in levels:
        if level and level not in found and len({text for _, text in level}) == len(level):
            found.append(level)
    return found


def _linear(format: str, low: float, high: float, beyond: float) -> Iterator[Density]:
    length = high - low
    if not length:  # one value stands in the middle of a short axis
        length = 0.2 * abs(high) or 1.0
        low -= length / 2
    start, end = low - MARGIN * length if low else 0.0, high + beyond * length
    for step in dict.fromkeys(_step(format, length / count, high) for count in COUNTS):
        first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
        if last - first < MOST:
            values = [float(f"{number * step:.12g}") for number in range(first, last + 1)]
            yield [(value, _tick_text(format, value, high)) for value in values]


def _step(format: str, least: float, high: float) -> float:
    if format == "duration" and high >= 2 and least <= CLOCK_S[-1]:
        return next(float(one) for one in CLOCK_S if one >= least)
    unit = _unit(format, high)
    power = 10 ** math.floor(math.log10(least / unit))
    return unit * power * next((k for k in (1, 2, 5) if k * power * unit >= least * 0.999), 10)


def _unit(format: str, high: float) -> float:
    if format == "bytes":
        return BYTE_UNITS[format_bytes(high).split()[1].lower()]
    if format == "energy":
        return 3.6e6 if high >= 3.6e6 else 3600.0
    if format == "duration" and high > CLOCK_S[-1]:
        return 86400.0
    return 1.0


def _logarithmic(format: str, low: float, high: float, beyond: float) -> Iterator[Density]:
    base = 4 if format == "bytes" else 10
    ratio = max(high / low, 1.0)
    if ratio < SHORT_RATIO:
        yield from _linear(format, low, high, beyond)
        return
    start, end = low / 2, min(high * 2 * ratio**beyond, 1e300)
    densities: list[tuple[Sequence[int], int]] = [(digits, 1) for digits in DIGITS[base]]
    densities += [((1,), every) for every in SPARSE]
    for digits, every in densities:
        values = sorted({value for value in _marks(format, base, digits, every, start, end) if start <= value <= end})
        if len(values) <= MOST:
            yield [(value, _tick_text(format, value, value)) for value in values]


def _marks(format: str, base: int, digits: Sequence[int], every: int, start: float, end: float) -> Iterator[float]:
    for unit, limit in CLOCK_UNITS_S if format == "duration" else ((1.0, math.inf),):
        lowest = 0 if unit > 1 else math.floor(math.log(start, base) / every) * every
        highest = math.ceil(math.log(max(min(end, limit) / unit, 1e-300), base))
        for power in range(lowest, highest + 1, every):
            for digit in digits:
                value = float(f"{unit * digit * float(base) ** power:.12g}")
                if value < limit:
                    yield value


def _tick_text(format: str, value: float, most: float) -> str:
    if format == "bytes":
        unit = format_bytes(most).split()[1]
        return isolated(f"{_bare(f'{value / BYTE_UNITS[unit.lower()]:,.3f}')} {unit}")
    if value == 0:
        return "0"
    if format == "money":  # a cent is much on an axis of tokens
        return _bare(f"{value:,.2f}") if abs(value) >= 0.1 else f"{value:.2g}"
    return _bare(format_value(value, format))


def _bare(text: str) -> str:
    return re.sub(r"(\.\d*?)0+(?=\D|$)", lambda found: found[1].rstrip("."), text)


@dataclass(frozen=True)
class Scale:
    """The ends of an axis; `at` says which share of its length a value has before it."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float], grace: float = 0.0) -> "Scale":
        """Around the values; longer at either end by this share of their stretch, on a logarithmic axis by 40%."""
        places = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
        low, high = min(places, default=axis.log / 2), max(places, default=1.0)
        if axis.log:
            room = 1.4 if grace or low == high else 1.0
            return cls(low / room, high * room, log=True)
        low = min(low, 0.0) if axis.from_zero else low
        room = (grace * (high - low)) or (0.1 * abs(high) or 1.0) * (low == high)
        return cls(low and low - room, high + room)


def fit_ticks(densities: list[Density], scale: Scale, length: float, *, across: bool = True) -> Density:
    shown = [[tick for tick in ticks if -1e-6 <= scale.at(tick[0]) <= 1 + 1e-6] for ticks in densities]
    shown = [ticks for ticks in shown if ticks]
    for ticks in shown:
        rooms = [text_width(text) + 16 if across else 28.0 for _, text in ticks]
        places = [scale.at(value) * length for value, _ in ticks]
        if all(places[i] - places[i - 1] >= (rooms[i] + rooms[i - 1]) / 2 for i in range(1, len(ticks))):
            return ticks
    return shown[-1][:1] if shown else []


def text_width(text: str) -> float:
    """About how many pixels a text of twelve takes, in whatever font; rather more than less."""
    return sum(map(_char_width, text))


def _char_width(char: str) -> float:
    if unicodedata.category(char) in ("Mn", "Cf"):  # what stands above others, and marks of direction
        return 0.0
    if unicodedata.east_asian_width(char) in "WF":
        return 12.0
    return 3.8 if char in " .,:;'|!()[]ijlIft" else 10.0 if char in "MWmw%@" else 8.4 if char.isupper() else 7.2
