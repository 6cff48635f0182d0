"""The numbers behind a picture as a table: nobody needs to see a picture to know what it says."""

from collections.abc import Callable
from typing import Any

from foretrain.reports.document import (
    Axis,
    Cell,
    Curves,
    Figures,
    Level,
    Message,
    Moments,
    Picture,
    Quantity,
    Ranks,
    Scatter,
    StackedBars,
    Table,
    cell_text,
)

MOST_ROWS = 60  # of a curve; every one of them would be no table to read
Rows = list[tuple[Cell, ...]]


def behind(picture: Picture | Figures) -> Table:
    make: dict[type, Callable[[Any], Table]] = {
        StackedBars: _stacked, Curves: _curves, Moments: _moments, Scatter: _scatter, Ranks: _ranks, Figures: _figures,
    }  # fmt: skip
    return make[type(picture)](picture)


def _figures(figures: Figures) -> Table:
    rows = tuple((item.label, item.value, item.range, item.source) for item in figures.items)
    return Table((), rows, frozenset({1, 2}))


def value_cell(value: float | None, format: str) -> Cell:
    if value is None:
        return "–"
    return Quantity(value, format)


def thinned(count: int, most: int = MOST_ROWS) -> list[int]:
    """At most so many places of a list, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _stacked(bars: StackedBars) -> Table:
    groups = list(dict.fromkeys(group for bar in bars.bars for group, _ in bar.parts))
    rows: Rows = [
        (Message(f"group.{group}"), *(Quantity(dict(bar.parts).get(group), "bytes") for bar in bars.bars))
        for group in groups
    ]
    sums = (sum(size for _, size in bar.parts) for bar in bars.bars)
    rows.append((Message("column.sum"), *(Quantity(size, "bytes") for size in sums)))
    for label, size in (("axis.limit", bars.limit_bytes), ("axis.card", bars.card_bytes)):
        if size is not None:
            rows.append((Message(label), *(Quantity(size, "bytes") for _ in bars.bars)))
    return Table(("", *(bar.label for bar in bars.bars)), tuple(rows), frozenset(range(1, len(bars.bars) + 1)))


def _curves(curves: Curves) -> Table:
    rows: Rows = []
    per_curve = max(12, MOST_ROWS // max(1, len(curves.traces)))
    for trace in curves.traces:
        for i in thinned(len(trace.values), per_curve):
            places = (
                value_cell(at[i], axis.format) for axis, at in zip(curves.axes, trace.places, strict=True)
            )  # fmt: skip
            rows.append((trace.label, *places, value_cell(trace.values[i], curves.y.format)))
    columns = ("", *(axis.label for axis in curves.axes), curves.y.label)
    return Table(columns, tuple(rows), frozenset(range(1, len(columns))))


def _moments(moments: Moments) -> Table:
    rows: Rows = []
    groups = list(dict.fromkeys(group for moment in moments.moments for group, _ in moment.parts))
    highest: list[tuple[int, int]] = []  # (place, bytes)
    before = ""
    for place, moment in enumerate(moments.moments):
        total, here = sum(size for _, size in moment.parts), moment.label.id
        if here != before:
            highest.append((place, total))
        elif total > highest[-1][1]:
            highest[-1] = (place, total)
        before = here
    top = max((total for _, total in highest), default=0)
    kept = [highest[i] for i in thinned(len(highest))]
    kept += [one for one in highest if one[1] == top and one not in kept][:1]
    tones = []
    for place, total in sorted(kept):
        sizes = dict(moments.moments[place].parts)
        label = moments.moments[place].label
        rows.append((label, Quantity(total, "bytes"), *(Quantity(sizes.get(group, 0), "bytes") for group in groups)))
        tones.append("strong" if total == top else "plain")
    columns = (
        Message("column.moment"), Message("column.allocated"), *(Message(f"group.{group}") for group in groups)
    )  # fmt: skip
    return Table(columns, tuple(rows), frozenset(range(1, len(columns))), tuple(tones))


def _scatter(scatter: Scatter) -> Table:
    many, ranged = len(scatter.clouds) > 1, any(d.low is not None for c in scatter.clouds for d in c.dots)
    noted = any(cell_text(dot.note) for cloud in scatter.clouds for dot in cloud.dots)
    rows: Rows = []
    for cloud in scatter.clouds:
        for dot in cloud.dots:
            row: list[Cell] = [dot.label]
            row += [cloud.label] if many else []
            row += [value_cell(dot.x, scatter.x.format), value_cell(dot.y, scatter.y.format)]
            row += [range_text(dot.low, dot.high, scatter.y)] if ranged else []
            row += [dot.note] if noted else []
            rows.append(tuple(row))
    columns: list[Cell] = ["", *([""] if many else []), scatter.x.label, scatter.y.label]
    columns += [Message("column.range")] if ranged else []
    columns += [scatter.note_label] if noted else []
    first = 2 if many else 1
    return Table(tuple(columns), tuple(rows), frozenset(range(first, first + 2 + ranged)))


def range_text(low: float | None, high: float | None, axis: Axis) -> str:
    if low is None or high is None:
        return "–"
    ends = [cell_text(value_cell(end, axis.format)) for end in (low, high)]
    return " – ".join(dict.fromkeys(ends))  # of equal ones, one


def _ranks(ranks: Ranks) -> Table:
    if ranks.numbers is not None:
        return ranks.numbers
    ranged = any(rank.low is not None for rank in ranks.ranks)
    remarked = any(cell_text(rank.remark) for rank in ranks.ranks)
    rows = tuple(
        (
            rank.label, value_cell(rank.value, ranks.axis.format),
            *([range_text(rank.low, rank.high, ranks.axis)] if ranged else []), *([rank.remark] if remarked else []),
        )
        for rank in ranks.ranks
    )  # fmt: skip
    columns = (
        "",
        ranks.axis.label,
        *([Message("column.range")] if ranged else []),
        *([ranks.remark_label] if remarked else []),
    )
    return Table(columns, rows, frozenset(range(1, 2 + ranged)))


def level_text(level: Level, axis: Axis) -> str:
    return f"{level.label.text()} {cell_text(value_cell(level.value, axis.format))}"
