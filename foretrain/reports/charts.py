"""Pictures as the JSON that draw.js draws: every text is made here, and numbers have the digits that an eye can tell.

What draws chooses among texts, colours and ticks, and computes places; it formats nothing.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from foretrain.base.messages import format_value, isolated, say
from foretrain.base.units import BYTE_UNITS, format_bytes
from foretrain.reports.document import (
    Axis,
    Curves,
    Dot,
    Level,
    Message,
    Moments,
    Picture,
    Rank,
    Ranks,
    Scatter,
    StackedBars,
    Trace,
    cell_text,
)
from foretrain.reports.numbers import level_text, range_text, value_cell
from foretrain.reports.palette import COLOURS

# The marks of an axis with their texts, at several densities: what draws takes the densest one that has room.
#
# Linear axes have even steps that people count in (1, 2, 5; bytes by powers of two; time by minutes and hours).
# Logarithmic axes have a few digits of every power.

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
    """(value, text) from low to high and somewhat beyond, a list for each density, the densest first.

    `format`: see Quantity. `low`, `high`: the ends of the values; they may be equal. A logarithmic axis leaves out what
    is not above 0. `beyond`: of its length the axis may be longer. In a level no two texts are equal; where that leaves
    none, as the ends are too close to each other, the lower end alone is marked.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return []
    if log and high <= 0:
        return []
    low = low if low > 0 or not log else high / 1e3
    made = _logarithmic if log else _linear
    return _distinct(made(format, low, high, beyond)) or [[(low, _text(format, low, high))]]


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
            yield [(value, _text(format, value, high)) for value in values]


def _step(format: str, least: float, high: float) -> float:
    """The first round step of at least so much."""
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
            yield [(value, _text(format, value, value)) for value in values]


def _marks(format: str, base: int, digits: Sequence[int], every: int, start: float, end: float) -> Iterator[float]:
    """These digits of every so many powers; of time, powers of each unit up to where the next begins."""
    for unit, limit in CLOCK_UNITS_S if format == "duration" else ((1.0, math.inf),):
        lowest = 0 if unit > 1 else math.floor(math.log(start, base) / every) * every
        highest = math.ceil(math.log(max(min(end, limit) / unit, 1e-300), base))
        for power in range(lowest, highest + 1, every):
            for digit in digits:
                value = float(f"{unit * digit * float(base) ** power:.12g}")
                if value < limit:
                    yield value


def _text(format: str, value: float, most: float) -> str:
    """As everywhere, without zeros that say nothing; bytes in the unit of the largest."""
    if format == "bytes":
        unit = format_bytes(most).split()[1]
        return isolated(f"{_bare(f'{value / BYTE_UNITS[unit.lower()]:,.3f}')} {unit}")
    if value == 0:
        return "0"
    if format == "money":  # a cent is much on an axis of tokens
        return _bare(f"{value:,.2f}") if abs(value) >= 0.1 else f"{value:.2g}"
    return _bare(format_value(value, format))


def _bare(text: str) -> str:
    """'5 min' of '5.0 min', '1.5' of '1.500'."""
    return re.sub(r"(\.\d*?)0+(?=\D|$)", lambda found: found[1].rstrip("."), text)


Json = dict[str, Any]
Parts = tuple[tuple[str, int], ...]
NAMED = ("number", "count", "money")  # formats without a unit: the name of the axis stands behind their values


def chart(picture: Picture) -> Json:
    """One picture; `kind` says which function of draw.js draws it."""
    match picture:
        case StackedBars():
            return _stacked(picture)
        case Curves():
            return _curves(picture)
        case Moments():
            return _moments(picture)
        case Scatter():
            return _scatter(picture)
        case Ranks():
            return _ranks(picture)


def short(value: float | None) -> float | int | None:
    """A number with six digits."""
    if value is None or isinstance(value, int):
        return value
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _shown(value: float, format: str) -> str:
    return cell_text(value_cell(value, format))


def _axis(axis: Axis, values: Iterable[float], beyond: float = MARGIN) -> Json:
    """`ticks`: for each density the marks and their texts. `named`: what stands behind a value without a unit."""
    places = [0.0, *values] if axis.from_zero else list(values)
    marks = ticks(axis.format, min(places), max(places), log=axis.log, beyond=beyond) if places else []
    label = axis.label.text()
    return {
        "label": label, "log": axis.log, "zero": axis.from_zero, "named": label if axis.format in NAMED else "",
        "ticks": [[[short(value), text] for value, text in level] for level in marks],
    }  # fmt: skip


def _levels(levels: tuple[Level, ...], axis: Axis) -> list[Json]:
    return [{"value": short(one.value), "label": level_text(one, axis), "along": one.along} for one in levels]


def _groups(parts: list[Parts]) -> list[Json]:
    """One layer for each group of components, from the bottom; `said` is what it holds, "" where that is nothing."""
    present = {group for each in parts for group, _ in each}
    rows = [dict(each) for each in parts]
    found = []
    for group, colour in COLOURS.items():
        if group in present:
            sizes = [row.get(group, 0) for row in rows]
            said = [_shown(size, "bytes") if size else "" for size in sizes]
            kept = group == "kept"
            found.append(
                {"label": say(f"group.{group}"), "values": sizes, "said": said, "hatched": kept,
                 "colour": COLOURS["overhead"] if kept else colour}
            )  # fmt: skip
    return found


def _sum(parts: Parts) -> int:
    return sum(size for _, size in parts)


def _stacked(bars: StackedBars) -> Json:
    lines = (("axis.limit", bars.limit_bytes), ("axis.card", bars.card_bytes))
    levels = tuple(Level(Message(id), size, "x") for id, size in lines if size is not None)
    sums = [_sum(bar.parts) for bar in bars.bars]
    axis = Axis(Message("column.allocated"), "bytes", from_zero=True)
    most = max([*sums, bars.scale_bytes])
    return {
        "kind": "stacked", "labels": [cell_text(bar.label) for bar in bars.bars],
        "ends": [_shown(size, "bytes") for size in sums], "levels": _levels(levels, axis), "most": most,
        "groups": _groups([bar.parts for bar in bars.bars]),
        "x": {**_axis(axis, [most, *(level.value for level in levels)], ROOM), "label": ""},
    }  # fmt: skip


def _curves(curves: Curves) -> Json:
    axes = [
        _axis(axis, (place for trace in curves.traces for place in trace.places[number]))
        for number, axis in enumerate(curves.axes)
    ]
    spans = [{"label": span.label.text(), "start": span.start, "end": span.end} for span in curves.spans]
    return {
        "kind": "curves", "axes": axes, "y": _axis(curves.y, (y for trace in curves.traces for y in trace.values)),
        "traces": [_trace(trace, curves) for trace in curves.traces],
        "levels": _levels(curves.levels, curves.y), "spans": spans, "small": curves.small,
        "smooth": curves.smooth,
    }  # fmt: skip


def _trace(trace: Trace, curves: Curves) -> Json:
    """`at`: for each axis the texts of the places; `said`: those of the values."""
    return {
        "label": cell_text(trace.label), "colour": trace.colour, "dashed": trace.dashed,
        "places": [[short(x) for x in places] for places in trace.places],
        "at": [
            [_shown(x, axis.format) for x in places] for axis, places in zip(curves.axes, trace.places, strict=True)
        ],
        "values": [short(y) for y in trace.values], "said": [_shown(y, curves.y.format) for y in trace.values],
    }  # fmt: skip


def _moments(moments: Moments) -> Json:
    """Labels repeat from block to block, as sizes do, so they are sent once and pointed to."""
    words: dict[str, int] = {}

    def pointed(texts: Iterable[str]) -> list[int]:
        return [words.setdefault(text, len(words)) for text in texts]

    labels = pointed(moment.label.text() for moment in moments.moments)
    parts = pointed(moment.part.text() for moment in moments.moments)
    sums = [_sum(moment.parts) for moment in moments.moments]
    totals = pointed(_shown(size, "bytes") for size in sums)
    groups = [{**group, "said": pointed(group["said"])} for group in _groups([one.parts for one in moments.moments])]
    y = Axis(Message("column.allocated"), "bytes", from_zero=True)
    return {
        "kind": "moments",
        "words": list(words),
        "labels": labels,
        "parts": parts,
        "totals": totals,
        "total": say("component.total"),
        "groups": groups,
        "levels": _levels(moments.levels, y),
        "x": say("axis.in_order"),
        "y": _axis(y, [*sums, *(level.value for level in moments.levels)]),
    }  # fmt: skip


def _scatter(scatter: Scatter) -> Json:
    dots = [dot for cloud in scatter.clouds for dot in cloud.dots]
    places = [place for _, line in scatter.lines for place in line]
    xs = [*(dot.x for dot in dots), *(x for x, _ in places)]
    ys = [y for dot in dots for y in (dot.y, dot.low, dot.high) if y is not None] + [y for _, y in places]
    clouds = [
        {"label": cell_text(cloud.label), "colour": cloud.colour, "dots": [_dot(dot, scatter) for dot in cloud.dots]}
        for cloud in scatter.clouds
    ]
    lines = [
        {"label": label.text(), "places": [[short(x), short(y)] for x, y in places]} for label, places in scatter.lines
    ]
    band = None
    if scatter.band:
        label, stretch = scatter.band
        band = {"label": label.text(), "places": [[short(x) for x in place] for place in stretch]}
    levels = [_levels((one,), scatter.x if one.along == "x" else scatter.y)[0] for one in scatter.levels]
    return {
        "kind": "scatter", "x": _axis(scatter.x, xs), "y": _axis(scatter.y, ys), "clouds": clouds, "lines": lines,
        "band": band, "levels": levels,
    }  # fmt: skip


def _dot(dot: Dot, scatter: Scatter) -> Json:
    """`said`: the lines that are shown when somebody points to it."""
    y = _shown(dot.y, scatter.y.format)
    found: Json = {"label": cell_text(dot.label), "x": short(dot.x), "y": short(dot.y)}
    if dot.low is not None and dot.high is not None:
        found |= {"low": short(dot.low), "high": short(dot.high)}
        y += f" ({range_text(dot.low, dot.high, scatter.y)})"
    x = _shown(dot.x, scatter.x.format)
    said = [f"{scatter.x.label.text()}: {x}", f"{scatter.y.label.text()}: {y}", cell_text(dot.note)]
    found["said"] = [line for line in said if line]
    found |= {"size": short(dot.size)} if dot.size else {}
    return found | ({"strong": True} if dot.strong else {})


def _ranks(ranks: Ranks) -> Json:
    values = [value for rank in ranks.ranks for value in (rank.value, rank.low, rank.high) if value is not None] + [
        level.value for level in ranks.levels
    ]
    axis = _axis(ranks.axis if ranks.axis.log else replace(ranks.axis, from_zero=True), values, ROOM)
    rows = [_rank(rank, ranks.axis) for rank in ranks.ranks]
    return {"kind": "ranks", "axis": axis, "rows": rows, "levels": _levels(ranks.levels, ranks.axis)}


def _rank(rank: Rank, axis: Axis) -> Json:
    """`end`: what stands behind the bar; `range`: of its value."""
    said, value = cell_text(rank.said), _shown(rank.value, axis.format)
    ranged = rank.low is not None and rank.high is not None
    return {
        "label": cell_text(rank.label), "value": short(rank.value), "low": short(rank.low), "high": short(rank.high),
        "end": f"{value} · {said}" if said else value, "range": range_text(rank.low, rank.high, axis) if ranged else "",
        "tone": rank.tone, "strong": rank.strong, "colour": rank.colour,
    }  # fmt: skip
