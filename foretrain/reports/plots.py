"""A drawing under way: elements of SVG. Without a style sheet words have a contrast of 4.5 to 1 on white and black."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from foretrain.base.messages import printable, runs_rightwards
from foretrain.reports.axes import Density, Scale, Tick, fit_ticks, text_width
from foretrain.reports.document import Level

# Lines and points: three to one at least against paper. chart.css has these, and those for dark paper.
LINES = ("#0072b2", "#c04f00", "#00795a", "#a4508b", "#5b5b5b", "#8a6d00")
INK, DIM, GRID, CARD = "var(--ink, #767676)", "var(--dim, #767676)", "var(--line, #76767640)", "var(--card, none)"
TONES = {"good": "var(--good, #1a7f37)", "warn": "var(--warn, #8a5d00)", "bad": "var(--bad, #c21f2b)"}
HALO = {"stroke": CARD, "stroke_width": 4, "stroke_linejoin": "round", "paint_order": "stroke"}
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "m0 -5l5 5l-5 5l-5 -5z", "m0 -4.6l4 8h-8z", "m-3.4 -3.4h6.8v6.8h-6.8z",
    "m-4 0h8m-4 -4v8m-3 -7l6 6m0 -6l-6 6", "m-3.4 -3.4l6.8 6.8m0 -6.8l-6.8 6.8",
)  # fmt: skip  # of markers with a radius of four, around their place
LEAVES = ("path", "rect", "circle")  # elements of SVG that hold nothing

Node = list[Any]  # an element: its tag, its attributes, its children, which are elements and texts


def node(tag: str, *children: Any, **attributes: Any) -> Node:
    named = {name.strip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    return [tag, {name: number(value) for name, value in named.items()}, *children]


def number(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def markup(tree: Node | str) -> str:
    if isinstance(tree, str):
        return escape(tree)
    tag, attributes, *children = tree
    begun = f"<{tag}" + "".join(f' {name}="{escape(value, quote=True)}"' for name, value in attributes.items())
    if tag == "input":
        return f"{begun}>"
    return f"{begun}/>" if tag in LEAVES else f"{begun}>{''.join(map(markup, children))}</{tag}>"


@dataclass
class Plot:
    """A drawing under way: the rectangle that values are in, its scales, and what is drawn so far."""

    width: int
    height: float
    x: Scale
    y: Scale
    left: float = 8.0
    top: float = 8.0
    right: float = 12.0
    bottom: float = 26.0
    mirrored: bool = False
    parts: list[Node] = field(default_factory=list)

    @property
    def across(self) -> float:
        return self.width - self.left - self.right

    @property
    def down(self) -> float:
        return self.height - self.top - self.bottom

    def px(self, value: float) -> float:
        share = self.x.at(value)
        return self.left + self.across * (1 - share if self.mirrored else share)

    def py(self, value: float) -> float:
        return self.top + self.down * (1 - self.y.at(value))

    def add(self, tag: str, *children: Any, **attributes: Any) -> None:
        self.parts.append(node(tag, *children, **attributes))

    def text(self, x: float, y: float, words: str, side: str = "left", fill: str = INK, **more: Any) -> None:
        """`side` of the text that is at x."""
        self.add("text", printable(words), x=float(x), y=float(y), fill=fill, text_anchor=_anchor(side), **more)

    def path(self, places: Iterable[tuple[float, float]], *, whole: bool = True, **attributes: Any) -> None:
        """A line through these places; unless it is to be `whole`, without those that one would not miss."""
        pixels = [(self.px(x), self.py(y)) for x, y in places]
        self.add("path", d=trail(pixels if whole else _spared(pixels)), **attributes)

    def axes(self, columns: Density, rows: Density, names: tuple[str, str] = ("", ""), *, inward: bool = False) -> None:
        """Draw the grid and the words of both axes; `inward`: words begin in the left half and end in the right one."""
        low, right = self.height - self.bottom, self.width - self.right
        places = [self.px(value) for value, _ in columns]
        ends = [self.py(value) for value, _ in rows]
        grid = [f"M{number(x)} {number(self.top)}V{number(low)}" for x in places]
        grid += [f"M{number(self.left)} {number(y)}H{number(right)}" for y in ends]
        self.add("path", d="".join(grid), stroke=GRID)
        beside = [node("text", text, x=self.left - 6, y=y + 4) for y, (_, text) in zip(ends, rows, strict=True)]
        self.add("g", *beside, fill=DIM, text_anchor=_anchor("right"))
        below: dict[str, list[Node]] = {"left": [], "middle": [], "right": []}
        for x, (_, text) in zip(places, columns, strict=True):
            wide, half = text_width(text) / 2, x < self.left + self.across / 2
            side, at = ("left" if half else "right") if inward else "middle", x
            if not inward and not wide <= x <= self.width - wide:  # it would leave the drawing
                side, at = ("left", 0.0) if half else ("right", float(self.width))
            below[side] += [
                node("text", line, x=float(at), y=low + 17 + 13 * row) for row, line in enumerate(text.split("\n"))
            ]
        for side, texts in below.items():
            if texts:
                self.add("g", *texts, fill=DIM, text_anchor=_anchor(side))
        if names[0]:
            self.text(self.left + self.across / 2, self.height - 6, names[0], "middle", DIM)
        if names[1]:
            middle = self.top + self.down / 2
            self.text(12, middle, names[1], "middle", DIM, transform=f"rotate(-90 12 {number(middle)})")

    def levels(self, levels: Sequence[tuple[Level, str]]) -> None:
        """Straight lines with their labels: along x above the rest, a row for each, along y on paper of their own."""
        low, right = self.height - self.bottom, self.width - self.right
        upright = [(level.value, text) for level, text in levels if level.along == "x"]
        for place, (value, text) in enumerate(upright):
            at, y = self.px(value), self.top - 6 - 15 * (len(upright) - 1 - place)
            if not -0.01 <= self.x.at(value) <= 1.01:  # farther away than the picture goes
                if self.mirrored:
                    self.text(self.left, y, f"← {text}")
                else:
                    self.text(right, y, f"{text} →", "right")
                continue
            self._level(f"M{number(at)} {number(y - 10)}V{number(low)}", place)
            if at + 5 + text_width(text) <= self.width:
                self.text(at + 5, y, text, **HALO)
            else:
                self.text(max(at - 5, text_width(text)), y, text, "right", **HALO)
        for place, (level, text) in enumerate(one for one in levels if one[0].along != "x"):
            at = self.py(level.value)
            if 0 <= self.y.at(level.value) <= 1:
                self._level(f"M{number(self.left)} {number(at)}H{number(right)}", place)
                self.text(right - 4, at + (15 if at - 11 < self.top + 7 else -7), text, "right", **HALO)

    def _level(self, path: str, place: int) -> None:
        self.add("path", d=path, stroke=INK, stroke_width=1.5, stroke_dasharray="2 3" if place % 2 else "6 4")

    def whisker(self, low: float, high: float, at: float, ink: str, *, across: bool) -> None:
        a, b, c = number(low), number(high), number(at)
        upright = f"M{c} {a}V{b}M{c} {a}m-4 0h8M{c} {b}m-4 0h8"
        path = f"M{a} {c}H{b}M{a} {c}m0-4v8M{b} {c}m0-4v8" if across else upright
        self.add("path", d=path, stroke=ink, stroke_width=1.5)

    def names(self, names: Iterable[tuple[float, float, float, str]]) -> None:
        """Name points (x, y, radius) beside or below them; those that would touch another are left out."""
        taken: list[tuple[float, float, float, float]] = []
        for x, y, radius, text in names:
            wide, right = text_width(text), self.width - self.right
            beside = x + radius + 4 + wide <= right
            left, middle = (x + radius + 4, y) if beside else (right - wide - 2, y + radius + 12)
            box = (left, middle - 8, left + wide, middle + 8)
            touches = any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)
            if left >= self.left and not touches:
                taken.append(box)
                self.text(left, middle + 4, text, **HALO)

    def svg(self) -> Node:
        """`plot`: left, top, width and height of the rectangle, where the script finds what somebody points to."""
        at = " ".join(number(float(each)) for each in (self.left, self.top, self.across, self.down))
        return node(
            "svg", *self.parts, viewBox=f"0 0 {self.width} {number(float(self.height))}", font_size=12, fill="none",
            data_plot=at, direction="rtl" if runs_rightwards() else "ltr", aria_hidden="true",
        )  # fmt: skip


def _anchor(side: str) -> str:
    sides = ("end", "start") if runs_rightwards() else ("start", "end")
    return {"left": sides[0], "right": sides[1]}.get(side, side)


def framed(
    plot: Plot, across: list[Density], down: list[Density], names: tuple[str, str], words: Sequence[Tick] = ()
) -> Plot:
    """The plot with its axes, and as much room beside it as their words need. `words`: along x, in place of ticks."""
    more = 13 * max((text.count("\n") for _, text in words), default=0)
    plot.height += more
    plot.bottom = 26.0 + (18 if names[0] else 0) + more
    rows = fit_ticks(down, plot.y, plot.down, across=False)
    plot.left = 12 + max((text_width(text) for _, text in rows), default=0.0) + (18 if names[1] else 0)
    columns = _apart(words, plot) if words else fit_ticks(across, plot.x, plot.across)
    if columns and not words:
        value, text = columns[-1]
        plot.right = max(plot.right, text_width(text) / 2 - (1 - plot.x.at(value)) * plot.across + 2)
    plot.axes(columns, rows, names, inward=bool(words))
    return plot


def _apart(words: Sequence[Tick], plot: Plot) -> Density:
    """Those that do not touch: words begin at their place in the left half, and end there in the right."""
    kept: Density = []
    end = -math.inf
    for place, text in words:
        at, wide = plot.px(place), 8 + max(map(text_width, text.split("\n")))
        left = at if plot.x.at(place) < 0.5 else at - wide
        if left >= end:
            kept, end = [*kept, (place, text)], left + wide
    return kept


def trail(places: Sequence[tuple[float, float]]) -> str:
    """A path through pixels, in tenths: the first, then how far each is from the one before."""
    found, before = "", (0, 0)
    for i, (x, y) in enumerate(places):
        at = (round(x * 10), round(y * 10))
        along, across = (re.sub(r"^(-?)0\.", r"\1.", number((at[k] - before[k]) / 10)) for k in (0, 1))
        if i and "0" in (along, across):
            found += f"v{across}" if along == "0" else f"h{along}"
        else:
            found += f"{'l' if i else 'M'}{along}{'' if across[0] == '-' else ' '}{across}"
        before = at
    return found


def _spared(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without points that are within a fifth of a pixel of the line between those that stay."""
    kept, start = places[:1], 0
    for end in range(2, len(places)):
        (left, low), (right, high) = places[start], places[end]
        slope = (high - low) / (right - left or 1e-9)
        between = places[start + 1 : end]
        if len(between) > 24 or any(abs(low + slope * (x - left) - y) > 0.2 for x, y in between):
            start = end - 1
            kept.append(places[start])
    return kept + places[1:][-1:]


def colour(place: int) -> str:
    place %= len(LINES)
    return f"var(--line-{place}, {LINES[place]})"


def marks(shape: int, places: Iterable[tuple[float, float]], fill: str, radius: float = 4.0, **more: Any) -> Node:
    """Markers at these pixels; some shapes are lines only."""
    path = SHAPES[shape % len(SHAPES)]
    ink = {"fill": fill} if path.endswith("z") else {"stroke": fill, "stroke_width": 1.6}
    arcs = re.sub(r"(?<=0 )1 0(?= )", "@", path)  # the flags of arcs are no lengths
    sized = re.sub(r"[\d.]+", lambda found: number(float(found[0]) * radius / 4), arcs).replace("@", "1 0")
    return node("path", d="".join(f"M{number(float(x))} {number(float(y))}{sized}" for x, y in places), **ink, **more)
