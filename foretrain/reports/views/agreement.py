"""Predicted against measured as points: on the line where both are the same, with the range that was stated."""

from collections.abc import Sequence
from typing import Literal

from foretrain.analysis.forecast_check import Row, Sources
from foretrain.base.messages import listed, source_name
from foretrain.reports.document import Axis, Block, Cloud, Dot, Message, Quantity, Scatter

BAND = 0.1  # either way of what was measured: what the eye compares with


def pictures(groups: Sequence[tuple[str, Sequence[Row]]], sources: Sources) -> tuple[Block, ...]:
    """A picture of bytes and one of times, as far as there are any. `groups`: (name of the run, its rows)."""
    found = []
    kinds: tuple[Literal["bytes", "seconds"], ...] = ("bytes", "seconds")
    for kind in kinds:
        rows = [(name, [row for row in rows if row.kind == kind]) for name, rows in groups]
        if sum(len(some) for _, some in rows) > 1:
            found.append(_picture(kind, [(name, some) for name, some in rows if some], sources[kind]))
    return tuple(found)


def _picture(kind: str, groups: list[tuple[str, list[Row]]], sources: Sequence[str]) -> Scatter:
    name, format = ("bytes", "bytes") if kind == "bytes" else ("time", "duration")
    clouds = tuple(
        Cloud(label if len(groups) > 1 else Message("report.quantities"), tuple(_dot(row) for row in rows), number)
        for number, (label, rows) in enumerate(groups)
    )
    values = [v for _, rows in groups for row in rows for v in (row.predicted, row.measured)]
    ends = (min(values) / 1.6, max(values) * 1.6)
    band = tuple((x, x * (1 - BAND), x * (1 + BAND)) for x in ends)
    return Scatter(
        Message("picture.predicted_memory" if kind == "bytes" else "picture.predicted_time"),
        Axis(Message(f"axis_measured.{name}"), format, True), Axis(Message(f"axis_predicted.{name}"), format, True),
        clouds,
        ((Message("report.same_line"), tuple((x, x) for x in ends)),), (Message("report.band", {"share": BAND}), band),
        note_label=Message("column.error"),
        source=Message("report.source_check", {"source": listed(map(source_name, sources))}),
    )  # fmt: skip


def _dot(row: Row) -> Dot:
    return Dot(
        Message(f"quantity.{row.id}"), row.measured, row.predicted, row.low, row.high,
        note=Quantity(row.error, "signed_percent"),
    )  # fmt: skip
