"""Pictures as SVG, for report, page, static site and notebook, each at a few widths, of which chart.css shows one;
chart.js says what is pointed to. Colours are CSS variables, for dark and print."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from foretrain.base.messages import printable, runs_rightwards, say
from foretrain.reports.axes import Density, Scale, fit_ticks, text_width, ticks
from foretrain.reports.document import (
    Axis,
    Curves,
    Dot,
    Level,
    Message,
    Moments,
    Picture,
    Ranks,
    Scatter,
    StackedBars,
    cell_text,
)
from foretrain.reports.numbers import level_text, range_text, value_cell
from foretrain.reports.plots import HALO, INK, LINES, TONES, Node, Plot, colour, framed, marks, node, number

# Colours of components: Okabe and Ito's, which colour-blind readers can tell apart (2008, "Color Universal Design").
COLOURS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#cc79a7",
    "weight_copies": "#9a86d6",
    "activations": "#009e73",
    "logits": "#d55e00",
    "temporaries": "#f0e442",
    "everything_else": "#44aa99",
    "vllm": "#e69f00",
    "overhead": "#999999",
    "python": "#999999",  # a CPU's overhead
    "kept": "#c4c4c4",
}
HATCHED = {"stroke": COLOURS["overhead"], "stroke_width": 1.5}  # what is only kept: nothing needs it
DASHES = ("", "6 3", "2 3", "9 3 2 3")
WIDTHS = {920: "wide", 620: "middle", 360: "narrow"}
NAMED = ("number", "count", "money")  # formats without a unit: the name of the axis stands behind their values
STOPS = 250  # places of curves that somebody can point to
NEAR = 0.015  # of the axis: another curve's value there comes from a point this near

Stop = list[Any]  # where it is along and across, title, end, and [series, text, along, across] for each line


Series = tuple[str, Node]  # what one entry of a legend stands for: its name, and how it is marked


@dataclass
class View:
    draw: Callable[[int], Plot]
    stops: list[Stop]
    label: str = ""


@dataclass
class Chart:
    """A picture as it is drawn. `mode`: what is pointed to is found along x, by rows, or near."""

    mode: str
    series: list[Series]
    views: list[View]
    small: bool = False
    smooth: bool = False


def chart(picture: Picture) -> Chart:
    make: dict[type, Callable[[Any], Chart]] = {
        StackedBars: _stacked, Curves: _curves, Moments: _moments, Scatter: _scatter, Ranks: _ranks,
    }  # fmt: skip
    return make[type(picture)](picture)


def pointed(chart: Chart) -> dict[str, Any]:
    """What the script needs of a chart: `stops` of each view; places are thousandths, texts stand once in `words`."""
    words = {"": 0}

    def word(text: str) -> int:
        return words.setdefault(printable(text), len(words))

    def stop(along: float, across: float, title: str, end: str, lines: list[Any]) -> Stop:
        entries = [[series, word(text), *(round(1000 * place) for place in places)] for series, text, *places in lines]
        return [round(1000 * along), round(1000 * across), word(title), word(end), entries]

    stops = [[stop(*each) for each in view.stops] for view in chart.views]
    return {"mode": chart.mode, "stops": stops, "words": list(words)}


def figure(picture: Picture, chart: Chart, name: str) -> Node:
    """A picture with its title, its legend and what the reader may choose. `name`: of its inputs, told from others."""
    title = printable(picture.title.text())
    source = [node("p", printable(picture.source.text()), class_="source")] if picture.source else []
    views = [
        node("div", *_drawings(view, chart.small), class_="view", hidden="" if i else None)
        for i, view in enumerate(chart.views)
    ]
    drawing = node(
        "div", *views, class_="drawing", role="img", tabindex=0, aria_label=title, title=say("report.by_keys")
    )
    keys = [
        node("li", node("button", key, printable(label), type="button", aria_pressed="true"))
        for label, key in chart.series
    ]
    return node(
        "figure", node("figcaption", node("h3", title), *source), *_choices(chart, name), drawing,
        *([node("ul", *keys, class_="legend")] if keys else []), node("p", class_="readout", role="status"),
        class_="picture",
    )  # fmt: skip


def _drawings(view: View, small: bool) -> list[Node]:
    found = []
    for width, name in list(WIDTHS.items())[small:]:
        svg = view.draw(width).svg()
        svg[1]["class"] = "wide middle" if small and name == "middle" else name
        found.append(svg)
    return found


def _choices(chart: Chart, name: str) -> list[Node]:
    buttons = []
    for i, view in enumerate(chart.views):
        radio = node("input", type="radio", name=f"{name}-axis", value=i, checked=None if i else "")
        buttons.append(node("label", radio, node("span", printable(view.label))))
    found = [node("fieldset", node("legend", say("report.over")), *buttons, class_="switch")] if buttons[1:] else []
    if chart.smooth:
        slider = node("input", type="range", min=0, max="0.99", step="0.01", value=0, autocomplete="off")
        found.append(node("label", say("report.smoothing"), " ", slider, node("output", "0"), class_="smooth"))
    return found


# -- what pictures have in common ---------------------------------------------------------------------------------


def shown(value: float, format: str) -> str:
    return cell_text(value_cell(value, format))


def _key(*parts: Node) -> Node:
    return node("svg", *parts, width=14, height=12, viewBox="0 0 14 12", fill="none", aria_hidden="true")


def _ticks_of(axis: Axis, values: Iterable[float], beyond: float = 0.3) -> list[Density]:
    places = [0.0, *values] if axis.from_zero else list(values)
    return ticks(axis.format, min(places), max(places), log=axis.log, beyond=beyond) if places else []


# -- bars ---------------------------------------------------------------------------------------------------------

Segment = tuple[float, str, dict[str, Any]]  # value, colour, attributes of its own


@dataclass
class Bar:
    label: str
    segments: list[Segment]
    end: str
    range: tuple[float, float] | None = None

    @property
    def value(self) -> float:
        return sum(value for value, *_ in self.segments)

    @property
    def most(self) -> float:
        return max(self.value, self.range[1] if self.range else 0)


def _bars(rows: list[Bar], axis: Axis, levels: Sequence[Level], most: float, thick: int, width: int) -> Plot:
    labels = [_folded(row.label, 13 if width < 420 else 30) for row in rows]
    height = max(thick + (26 if width < 420 else 16), 6 + 15 * max(map(len, labels), default=1))
    beside = 10 + max((text_width(line) for lines in labels for line in lines), default=0)
    mirrored, above, below = runs_rightwards(), 6.0 + 15 * len(levels), 44.0 if axis.label.id else 26.0
    scale = _bar_scale(rows, axis.log, levels, most, width - beside - 20)
    left, right = (12.0, beside) if mirrored else (beside, 12.0)
    plot = Plot(
        width, above + height * len(rows) + below, scale, Scale(len(rows), 0), left, above, right, below, mirrored
    )
    columns = fit_ticks(_ticks_of(axis, [scale.low, scale.high], 0), scale, plot.across)
    plot.axes(columns, [], (axis.label.text() if axis.label.id else "", ""))
    name, side = (plot.width - right + 8, "left") if mirrored else (left - 8, "right")
    for i, (row, lines) in enumerate(zip(rows, labels, strict=True)):
        middle = plot.py(i + 0.5)
        for k, line in enumerate(lines):
            plot.text(name, middle + 4 + 15 * (k - (len(lines) - 1) / 2), line, side)
        _segments(plot, row, middle, thick)
        if row.range:
            low, high = (plot.px(max(end, scale.low)) for end in row.range)
            plot.whisker(low, high, middle, INK, across=True)
    plot.levels([(replace(level, along="x"), level_text(level, axis)) for level in levels])
    for i, row in enumerate(rows):
        at = plot.px(row.most) + (-6 if mirrored else 6)
        plot.text(at, plot.py(i + 0.5) + 4, row.end, "right" if mirrored else "left", **HALO)
    return plot


def _bar_scale(rows: list[Bar], log: bool, levels: Sequence[Level], most: float, room: float) -> Scale:
    ends = [(row.most, max(0.5, 1 - (text_width(row.end) + 14) / room)) for row in rows]
    high = max([most, *(level.value * 1.02 for level in levels if level.value < 4 * most)])
    if not log:
        return Scale(0, max([high, *(value / share for value, share in ends)]) or 1.0)
    least = [min(row.value, row.range[0] if row.range else row.value) for row in rows]
    low = min((value for value in least if value > 0), default=most) / 1.3
    beyond = (low * (value / low) ** (1 / share) for value, share in ends if value > low)
    return Scale(low, max([high * 1.1, *beyond]), log=True)


def _segments(plot: Plot, row: Bar, middle: float, thick: int) -> None:
    ends = [max(plot.x.low, end) for end in accumulate((value for value, *_ in row.segments), initial=0.0)]
    for series, (value, fill, more) in enumerate(row.segments):
        a, b = sorted((plot.px(ends[series]), plot.px(ends[series + 1])))
        if not value:
            continue
        x, y, wide = a + plot.mirrored, middle - thick / 2, max(b - a - (len(row.segments) > 1), 0.5)
        if "stroke" in more:
            plot.add("path", d=_hatches(x, y, wide, thick), **more, data_series=series)
        plot.add("rect", x=x, y=y, width=wide, height=thick, fill=fill, **more, data_series=series)


def _hatches(x: float, y: float, width: float, height: float) -> str:
    path = ""
    for k in range(8 - int(height), int(width), 8):
        left, right = max(k, 0), min(k + height, width)
        path += f"M{number(x + left)} {number(y + height - left + k)}l{number(right - left)} {number(left - right)}"
    return path


def _folded(label: str, most: int) -> list[str]:
    lines = [""]
    for word in label.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) + 1 > most:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return [line if len(line) <= most + 6 else f"{line[: most + 5]}…" for line in lines[:3]]


def _stacked(bars: StackedBars) -> Chart:
    lines = (("axis.limit", bars.limit_bytes), ("axis.card", bars.card_bytes))
    levels = [Level(Message(id), size, "x") for id, size in lines if size is not None]
    groups = _groups([bar.parts for bar in bars.bars])
    rows = []
    for i, bar in enumerate(bars.bars):
        segments: list[Segment] = [
            (sizes[i], "none" if group == "kept" else COLOURS[group], HATCHED if group == "kept" else {})
            for group, sizes in groups
        ]
        rows.append(Bar(cell_text(bar.label), segments, shown(sum(size for _, size in bar.parts), "bytes")))
    axis, most = Axis(Message(""), "bytes", from_zero=True), max([*(row.value for row in rows), bars.scale_bytes])
    stops = [[0.5, (i + 0.5) / len(rows), row.label, row.end, _held(groups, i)] for i, row in enumerate(rows)]
    return Chart("rows", _swatches(groups), [View(lambda width: _bars(rows, axis, levels, most, 20, width), stops)])


def _ranks(ranks: Ranks) -> Chart:
    axis = ranks.axis if ranks.axis.log else replace(ranks.axis, from_zero=True)
    rows, stops = [], []
    for i, rank in enumerate(ranks.ranks):
        remark, value = cell_text(rank.remark), shown(rank.value, axis.format)
        fill = TONES.get(rank.tone, colour(0)) if rank.colour is None else colour(rank.colour)
        ends = None if rank.low is None or rank.high is None else (rank.low, rank.high)
        segment = (rank.value, fill, {} if rank.strong else {"fill_opacity": "0.6"})
        rows.append(Bar(cell_text(rank.label), [segment], f"{value} · {remark}" if remark else value, ends))
        ranged = range_text(*ends, axis) if ends else ""
        stops.append([0.5, (i + 0.5) / len(ranks.ranks), rows[i].label, ranged, [[0, rows[i].end]]])
    most = max([1e-9, *(row.most for row in rows), *(level.value for level in ranks.levels)])
    return Chart("rows", [], [View(lambda width: _bars(rows, axis, ranks.levels, most, 15, width), stops)])


# -- groups of memory, stacked ------------------------------------------------------------------------------------

Parts = tuple[tuple[str, int], ...]
Groups = list[tuple[str, list[int]]]  # (group, bytes of each bar or moment), from the bottom


def _groups(parts: Sequence[Parts]) -> Groups:
    present = {group for each in parts for group, _ in each}
    rows = [dict(each) for each in parts]
    return [(group, [row.get(group, 0) for row in rows]) for group in COLOURS if group in present]


def _held(groups: Groups, place: int) -> list[Any]:
    return [
        [series, f"{say(f'group.{group}')}: {shown(sizes[place], 'bytes')}"]
        for series, (group, sizes) in enumerate(groups)
        if sizes[place]
    ]


def _swatches(groups: Groups) -> list[Series]:
    square = {"x": 0.5, "y": 0.5, "width": 11, "height": 11}
    found = []
    for group, _ in groups:
        key = [node("rect", **square, fill=COLOURS[group])]
        if group == "kept":
            lines = node("path", d="M.5 6 6 .5M.5 11.5l11-11M6 11.5 11.5 6", **HATCHED)
            key = [lines, node("rect", **square, **HATCHED)]
        found.append((say(f"group.{group}"), _key(*key)))
    return found


def _moments(moments: Moments) -> Chart:
    count, groups = len(moments.moments), _groups([moment.parts for moment in moments.moments])
    layers = [list(accumulate(column, initial=0)) for column in zip(*(sizes for _, sizes in groups), strict=True)]
    axis = Axis(Message("column.allocated"), "bytes", from_zero=True)
    ends = [*(layer[-1] for layer in layers), *(level.value for level in moments.levels)]
    x, y = Scale(0, max(count - 1, 1)), Scale(0, 1.06 * max(ends, default=1) or 1)
    parts = [moment.part.text() for moment in moments.moments]
    starts = [i for i in range(count) if not i or parts[i] != parts[i - 1]]
    rows, names = _ticks_of(axis, ends), (say("axis.in_order"), axis.label.text())

    def draw(width: int) -> Plot:
        words = [(float(i), parts[i].replace(" ", "\n") if width < 420 else parts[i]) for i in starts]
        plot = framed(Plot(width, 340.0, x, y), [], rows, names, words)
        for series, (group, _) in enumerate(groups):
            edge = _held_on([layer[series + 1] for layer in layers])
            edge += _held_on([layer[series] for layer in layers])[::-1]
            plot.path(edge, fill=COLOURS[group], data_series=series)
        plot.levels([(level, level_text(level, axis)) for level in moments.levels])
        return plot

    stops = []
    for i, moment in enumerate(moments.moments):
        total = f"{say('component.total')}: {shown(layers[i][-1], 'bytes')}"
        stops.append([x.at(i), 1 - y.at(layers[i][-1]), moment.label.text(), total, _held(groups, i)[::-1]])
    return Chart("along", _swatches(groups), [View(draw, stops)])


def _held_on(sizes: Sequence[int]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for i, size in enumerate(sizes):
        if not i or size != sizes[i - 1]:
            found += [(i, sizes[i - 1]), (i, size)] if i else [(i, size)]
    return [*found, (len(sizes) - 1, sizes[-1])]


# -- curves and points --------------------------------------------------------------------------------------------

Point = tuple[float, float, int]  # along, across, and which value of its trace it is


def _curves(curves: Curves) -> Chart:
    many = len(curves.traces) > 1
    dashes = ["" if trace.dashed or not many else DASHES[trace.colour // len(LINES) % 4] for trace in curves.traces]
    series = []
    for trace, dash in zip(curves.traces, dashes, strict=True) if many else ():
        line = node("path", d="M0 6H14", stroke=colour(trace.colour), stroke_width=2, stroke_dasharray=dash or None)
        dot = [marks(trace.colour, [(7, 6)], colour(trace.colour), 3.5)] if trace.dashed else []
        series.append((cell_text(trace.label), _key(line, *dot)))
    views = [_curves_over(curves, place, dashes) for place in range(len(curves.axes))]
    return Chart("along", series, views, curves.small, curves.smooth)


def _curves_over(curves: Curves, place: int, dashes: list[str]) -> View:
    axis, many = curves.axes[place], len(curves.traces) > 1
    points: list[list[Point]] = []
    for trace in curves.traces:
        pairs = zip(trace.places[place], trace.values, range(len(trace.values)), strict=True)
        points.append([(x, y, k) for x, y, k in pairs if y is not None and math.isfinite(x) and math.isfinite(y)])
    xs, ys = ([point[i] for trace in points for point in trace] for i in (0, 1))
    x, y = Scale.of(axis, xs), Scale.of(curves.y, ys, 0.06)
    names = ("", "") if curves.small else (axis.label.text(), curves.y.label.text())
    columns, rows = _ticks_of(axis, xs, 0), _ticks_of(curves.y, ys)

    def draw(width: int) -> Plot:
        plot = framed(Plot(width, 190.0 if curves.small else 320.0, x, y), columns, rows, names)
        for span in curves.spans:
            a, b = (min(max(plot.px(end), plot.left), plot.width - plot.right) for end in (span.start, span.end))
            shade = {"x": a, "y": plot.top, "width": max(2.0, b - a), "fill": TONES["warn"]}
            plot.add("rect", **shade, height=plot.down, opacity=".16")
            plot.add("rect", **shade, height=3, opacity=".9")
        for series, (trace, found) in enumerate(zip(curves.traces, points, strict=True)):
            ink, kind = colour(trace.colour), {"data_series": series}
            kind |= {"data_smooth": ""} if curves.smooth and not trace.dashed else {}
            wide = 2.2 if trace.dashed else 1.6
            plot.path(
                [(x, y) for x, y, _ in found], stroke=ink, stroke_width=wide, stroke_dasharray=dashes[series] or None,
                stroke_linejoin="round", whole="data_smooth" in kind, **kind,
            )  # fmt: skip
            few = math.ceil(len(found) / 30) or 1 if trace.dashed else 1
            if trace.dashed or (len(found) < 60 and not many):
                dots = [(plot.px(x), plot.py(y)) for x, y, _ in found[::few]]
                hidden = {"data_marks": ""} if kind.pop("data_smooth", None) is not None else {}
                plot.parts.append(marks(trace.colour, dots, ink, 3, **kind, **hidden))
        plot.levels([(level, level_text(level, curves.y)) for level in curves.levels])
        return plot

    return View(draw, _curve_stops(curves, place, points, x, y), axis.label.text())


def _curve_stops(curves: Curves, place: int, points: list[list[Point]], x: Scale, y: Scale) -> list[Stop]:
    """For each place that has a point the points of every curve that are as good as there."""
    axis, found = curves.axes[place], []
    named = axis.label.text() if axis.format in NAMED else ""
    shares = [sorted((x.at(px), 1 - y.at(py), k) for px, py, k in trace) for trace in points]
    for at in sorted({round(share * STOPS) / STOPS for trace in shares for share, _, _ in trace}):
        lines = []
        for series, trace in enumerate(shares):
            first = bisect_left(trace, at - NEAR, key=lambda point: point[0])
            near = trace[first : bisect_right(trace, at + NEAR, key=lambda point: point[0])]
            if near:
                lines.append((*min(near, key=lambda point: abs(point[0] - at)), series))
        along, across, k, series = min(lines, key=lambda line: abs(line[0] - at))
        here = curves.traces[series].places[place][k]
        spans = dict.fromkeys(span.label.text() for span in curves.spans if span.start <= here <= span.end)
        lines_at = []
        for px, py, which, one in lines:
            trace = curves.traces[one]
            lines_at.append([one, f"{cell_text(trace.label)}: {shown(trace.values[which], curves.y.format)}", px, py])
        title = f"{shown(here, axis.format)} {named}".strip()
        found.append([along, across, title, " · ".join(spans), lines_at])
    return found


def _scatter(scatter: Scatter) -> Chart:
    dots = [dot for cloud in scatter.clouds for dot in cloud.dots]
    lined = [place for _, line in scatter.lines for place in line]
    xs = [*(dot.x for dot in dots), *(x for x, _ in lined)]
    ys = [y for dot in dots for y in (dot.y, dot.low, dot.high) if y is not None] + [y for _, y in lined]
    x, y = (
        Scale.of(axis, values, 0.0 if scatter.band and axis.log else grace)
        for axis, values, grace in ((scatter.x, xs, 0.06), (scatter.y, ys, 0.1))
    )
    names, columns, rows = (
        (scatter.x.label.text(), scatter.y.label.text()),
        _ticks_of(scatter.x, xs),
        _ticks_of(scatter.y, ys),
    )
    levels = [(level, level_text(level, scatter.x if level.along == "x" else scatter.y)) for level in scatter.levels]
    biggest, series = max((dot.size for dot in dots), default=0.0), _scatter_keys(scatter)

    def draw(width: int) -> Plot:
        above = 8.0 + 15 * sum(level.along == "x" for level in scatter.levels)
        plot = framed(Plot(width, 360.0, x, y, top=above, right=20.0), columns, rows, names)
        if scatter.band:
            edge = [(at, low) for at, low, _ in scatter.band[1]]
            edge += [(at, high) for at, _, high in reversed(scatter.band[1])]
            plot.path(edge, fill=INK, opacity=".13", data_series=len(series) - 1)
        for i, (_, line) in enumerate(scatter.lines):
            dash, place = DASHES[i % 4] or None, len(scatter.clouds) + i
            plot.path(line, stroke=INK, stroke_width=1.5, stroke_dasharray=dash, data_series=place)
        named = []
        for i, cloud in enumerate(scatter.clouds):
            ink, found = colour(cloud.colour), []
            for dot in cloud.dots:
                at = (plot.px(dot.x), plot.py(dot.y))
                size = 4 + 11 * math.sqrt(dot.size / biggest) if biggest else 6.0 if dot.strong else 4.0
                found.append(marks(cloud.colour, [at], ink, size))
                named += [(*at, size, cell_text(dot.label))] if dot.strong else []
            plot.add("g", *found, data_series=i, fill_opacity=".7" if biggest else None)
            for dot in cloud.dots:
                if dot.low is not None and dot.high is not None:
                    plot.whisker(plot.py(dot.low), plot.py(dot.high), plot.px(dot.x), ink, across=False)
        plot.levels(levels)
        plot.names(named)
        return plot

    stops = [_dot_stop(scatter, i, dot, x, y) for i, cloud in enumerate(scatter.clouds) for dot in cloud.dots]
    return Chart("near", series if len(series) > 1 else [], [View(draw, stops)])


def _dot_stop(scatter: Scatter, series: int, dot: Dot, x: Scale, y: Scale) -> Stop:
    across = f"{scatter.y.label.text()}: {shown(dot.y, scatter.y.format)}"
    if dot.low is not None and dot.high is not None:
        across += f" ({range_text(dot.low, dot.high, scatter.y)})"
    texts = (f"{scatter.x.label.text()}: {shown(dot.x, scatter.x.format)}", across, cell_text(dot.note))
    lines = [[series, line] for line in texts if line]
    return [x.at(dot.x), 1 - y.at(dot.y), cell_text(dot.label), "", lines]


def _scatter_keys(scatter: Scatter) -> list[Series]:
    dots = ((one.label, marks(one.colour, [(7, 6)], colour(one.colour))) for one in scatter.clouds)
    found: list[Series] = [(cell_text(label), _key(dot)) for label, dot in dots]
    for i, (label, _) in enumerate(scatter.lines):
        dash = DASHES[i % 4] or None
        line = node("path", d="M0 6H14", stroke=INK, stroke_width=1.5, stroke_dasharray=dash)
        found.append((label.text(), _key(line)))
    if scatter.band:
        square = node("rect", x=0.5, y=0.5, width=11, height=11, fill=INK, opacity=".13")
        found.append((scatter.band[0].text(), _key(square)))
    return found
