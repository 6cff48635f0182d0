"""What a report says, before it has a form: sections of paragraphs, tables and pictures, as ids and numbers.

`plan_view` and `run_view` make Documents from records; `text` and `html` render them. Nothing here computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretrain import bidi
from foretrain.messages import format_value, say


@dataclass(frozen=True)
class Message:
    """A text by id with its values; a value may itself be a Message."""

    id: str
    values: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        values = {k: v.text() if isinstance(v, Message) else v for k, v in self.values.items()}
        return say(self.id, **values)


@dataclass(frozen=True)
class Quantity:
    """A number with the format of `messages`: bytes, duration, percent, signed_percent, count, flops, rate, energy."""

    value: float | tuple[float, float] | None
    format: str

    def text(self) -> str:
        return "–" if self.value is None else format_value(self.value, self.format)


Cell = str | Message | Quantity


def cell_text(cell: Cell) -> str:
    """A cell as text."""
    return bidi.isolated(cell) if isinstance(cell, str) else cell.text()


@dataclass(frozen=True)
class Paragraph:
    """One sentence or more; `tone` is good, bad, warn or plain."""

    message: Message
    tone: str = "plain"


@dataclass(frozen=True)
class Table:
    """Column heads and rows; `numeric` columns are right-aligned. `tones` marks rows as in Paragraph.

    `optional`: columns that a narrow terminal leaves out, the first of them first.
    """

    columns: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    tones: tuple[str, ...] = ()
    optional: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bar:
    """One stacked bar: (component id, bytes) from the bottom, and its label."""

    label: Cell
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StackedBars:
    """Memory bars by component against a limit (None where there is none)."""

    title: Message
    bars: tuple[Bar, ...]
    limit_bytes: int | None


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: Cell
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Lines:
    """A line chart, such as loss over steps; `level` is a horizontal line with a label."""

    title: Message
    x_label: Message
    y_label: Message
    series: tuple[Series, ...]
    level: tuple[Message, float] | None = None


@dataclass(frozen=True)
class Pairs:
    """Predicted beside measured, one pair of bars for each row, all in one unit format."""

    title: Message
    format: str
    rows: tuple[tuple[Cell, float, float], ...]


@dataclass(frozen=True)
class Verbatim:
    """Text as it is, such as a sample of a model."""

    text: str


Block = Paragraph | Table | StackedBars | Lines | Pairs | Verbatim


@dataclass(frozen=True)
class Section:
    """A titled part of a document."""

    title: Message
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: Message
    subtitle: Message
    sections: Sequence[Section]
