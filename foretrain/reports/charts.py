"""Pictures as the JSON that report.js draws: texts made, numbers shortened to what an eye can tell apart."""

from typing import Any

from foretrain.base.messages import say
from foretrain.reports.document import (
    Axis,
    Curves,
    Dot,
    Level,
    Lines,
    Moments,
    Pairs,
    Picture,
    Ranks,
    Scatter,
    StackedBars,
    cell_text,
)
from foretrain.reports.numbers import level_text, value_cell
from foretrain.reports.palette import COLOURS

Json = dict[str, Any]


def chart(picture: Picture) -> Json:
    """One picture; `kind` says which function of report.js draws it."""
    match picture:
        case StackedBars():
            return _stacked(picture)
        case Lines():
            return _lines(picture)
        case Pairs():
            return _pairs(picture)
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


def _axis(axis: Axis) -> Json:
    return {"label": axis.label.text(), "format": axis.format, "log": axis.log}


def _levels(levels: tuple[Level, ...], axis: Axis) -> list[Json]:
    return [{"value": short(one.value), "label": level_text(one, axis), "along": one.along} for one in levels]


def _groups(parts: list[tuple[tuple[str, int], ...]]) -> list[Json]:
    """One layer for each group of components, from the bottom."""
    present = {group for each in parts for group, _ in each}
    rows = [dict(each) for each in parts]
    return [
        {
            "label": say(f"group.{group}"), "values": [row.get(group, 0) for row in rows],
            "colour": COLOURS["overhead" if group == "kept" else group], "hatched": group == "kept",
        }
        for group in COLOURS
        if group in present
    ]  # fmt: skip


def _stacked(bars: StackedBars) -> Json:
    lines = (("axis.limit", bars.limit_bytes), ("axis.card", bars.card_bytes))
    levels = [
        {"value": size, "label": f"{say(id)} {cell_text(value_cell(size, 'bytes'))}", "along": "x"}
        for id, size in lines
        if size is not None
    ]
    ends = [cell_text(value_cell(sum(size for _, size in bar.parts), "bytes")) for bar in bars.bars]
    return {
        "kind": "stacked", "labels": [cell_text(bar.label) for bar in bars.bars], "ends": ends, "levels": levels,
        "groups": _groups([bar.parts for bar in bars.bars]),
    }  # fmt: skip


def _lines(lines: Lines) -> Json:
    traces = [
        {
            "label": cell_text(series.label), "colour": number, "dashed": False,
            "places": [[short(x) for x in series.xs]], "values": [short(y) for y in series.ys],
        }
        for number, series in enumerate(lines.series)
    ]  # fmt: skip
    axis = {"label": lines.x_label.text(), "format": "number", "log": False}
    y = {"label": lines.y_label.text(), "format": "number", "log": False}
    levels: list[Json] = []
    if lines.level is not None:
        label, value = lines.level
        levels.append({"value": short(value), "label": label.text(), "along": "y"})
    return {"kind": "curves", "axes": [axis], "y": y, "traces": traces, "levels": levels, "spans": [], "small": False}


def _pairs(pairs: Pairs) -> Json:
    return {
        "kind": "pairs", "format": pairs.format, "labels": [cell_text(row[0]) for row in pairs.rows],
        "names": [say("axis.predicted"), say("axis.measured")],
        "values": [[short(row[1]) for row in pairs.rows], [short(row[2]) for row in pairs.rows]],
    }  # fmt: skip


def _curves(curves: Curves) -> Json:
    traces = [
        {
            "label": cell_text(trace.label), "colour": trace.colour, "dashed": trace.dashed,
            "places": [[short(x) for x in places] for places in trace.places],
            "values": [short(y) for y in trace.values],
        }
        for trace in curves.traces
    ]  # fmt: skip
    spans = [{"label": span.label.text(), "start": span.start, "end": span.end} for span in curves.spans]
    return {
        "kind": "curves", "axes": [_axis(axis) for axis in curves.axes], "y": _axis(curves.y), "traces": traces,
        "levels": _levels(curves.levels, curves.y), "spans": spans, "small": curves.small,
    }  # fmt: skip


def _moments(moments: Moments) -> Json:
    """Labels repeat from block to block, so they are sent once and pointed to."""
    words: dict[str, int] = {}
    labels = [words.setdefault(moment.label.text(), len(words)) for moment in moments.moments]
    parts = [words.setdefault(moment.part.text(), len(words)) for moment in moments.moments]
    return {
        "kind": "moments", "words": list(words), "labels": labels, "parts": parts, "total": say("component.total"),
        "groups": _groups([moment.parts for moment in moments.moments]),
        "levels": _levels(moments.levels, Axis(moments.title, "bytes")), "y": say("column.allocated"),
        "x": say("axis.in_order"),
    }  # fmt: skip


def _dot(dot: Dot) -> Json:
    found: Json = {"label": cell_text(dot.label), "x": short(dot.x), "y": short(dot.y)}
    if dot.low is not None and dot.high is not None:
        found |= {"low": short(dot.low), "high": short(dot.high)}
    found |= {"note": note} if (note := cell_text(dot.note)) else {}
    found |= {"size": short(dot.size)} if dot.size else {}
    return found | ({"strong": True} if dot.strong else {})


def _scatter(scatter: Scatter) -> Json:
    clouds = [
        {"label": cell_text(cloud.label), "colour": cloud.colour, "dots": [_dot(dot) for dot in cloud.dots]}
        for cloud in scatter.clouds
    ]
    lines = [
        {"label": label.text(), "places": [[short(x), short(y)] for x, y in places]} for label, places in scatter.lines
    ]
    band = None
    if scatter.band:
        label, stretch = scatter.band
        band = {"label": label.text(), "places": [[short(x) for x in place] for place in stretch]}
    levels = [
        {"value": short(one.value), "label": level_text(one, scatter.x if one.along == "x" else scatter.y),
         "along": one.along}
        for one in scatter.levels
    ]  # fmt: skip
    return {
        "kind": "scatter", "x": _axis(scatter.x), "y": _axis(scatter.y), "clouds": clouds, "lines": lines,
        "band": band, "levels": levels,
    }  # fmt: skip


def _ranks(ranks: Ranks) -> Json:
    rows = [
        {
            "label": cell_text(rank.label), "value": short(rank.value), "low": short(rank.low),
            "high": short(rank.high), "said": cell_text(rank.said), "tone": rank.tone, "strong": rank.strong,
            "colour": rank.colour,
        }
        for rank in ranks.ranks
    ]  # fmt: skip
    return {"kind": "ranks", "axis": _axis(ranks.axis), "rows": rows, "levels": _levels(ranks.levels, ranks.axis)}
