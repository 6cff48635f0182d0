"""Pictures as the JSON that draw.js draws: every text is made here, and numbers have the digits that an eye can tell.

What draws chooses among texts, colours and ticks, and computes places; it formats nothing.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from foretrain.base.messages import say
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
from foretrain.reports.ticks import MARGIN, ROOM, ticks

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
