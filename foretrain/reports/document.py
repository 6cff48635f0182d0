"""What a report says, before it has a form: sections of paragraphs, tables and pictures, as ids and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from foretrain.base import messages
from foretrain.base.messages import format_value, say, source_name


@dataclass(frozen=True)
class Message:
    id: str
    values: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        values = {k: v.text() if isinstance(v, Message) else source_name(v) for k, v in self.values.items()}
        return say(self.id, **values)


@dataclass(frozen=True)
class Quantity:
    """A number with the format of `messages`: bytes, duration, percent, signed_percent, count, flops, rate, energy."""

    value: float | tuple[float, ...] | tuple[float, float, float, str] | None
    format: str

    def text(self) -> str:
        return "–" if self.value is None else format_value(self.value, self.format)


Cell = str | Message | Quantity


def cell_text(cell: Cell) -> str:
    return messages.isolated(source_name(cell)) if isinstance(cell, str) else cell.text()


@dataclass(frozen=True)
class Paragraph:
    message: Message
    tone: str = "plain"


@dataclass(frozen=True)
class Table:
    """Heads and rows; `numeric` columns are right-aligned, `optional` ones left out of narrow terminals."""

    columns: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    tones: tuple[str, ...] = ()
    optional: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bar:
    label: Cell
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StackedBars:
    """Memory bars by component against a limit (None where there is none)."""

    title: Message
    bars: tuple[Bar, ...]
    limit_bytes: int | None
    card_bytes: int | None = None  # all that the device has, where that is another line
    source: Message | None = None
    scale_bytes: int = 0  # pictures that are compared with each other reach as far, at least


@dataclass(frozen=True)
class Verbatim:
    text: str


@dataclass(frozen=True)
class Figure:
    """A number that people look for first, with its source (estimated, calibrated, measured) and its range, if any."""

    label: Message
    value: Cell
    source: Cell
    range: Cell = ""


@dataclass(frozen=True)
class Figures:
    items: tuple[Figure, ...]


@dataclass(frozen=True)
class Axis:
    """What is laid off on an axis: its label, and the format of its numbers (see Quantity; or number, or percent)."""

    label: Message
    format: str = "number"
    log: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Level:
    """A straight line across a picture with its label; `along` is the axis that `value` is on."""

    label: Message
    value: float
    along: str = "y"


@dataclass(frozen=True)
class Span:
    label: Message
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """One curve of `Curves`: values, and for each of its axes as many places. `dashed`: second to its like."""

    label: Cell
    places: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Curves:
    title: Message
    axes: tuple[Axis, ...]
    y: Axis
    traces: tuple[Trace, ...]
    levels: tuple[Level, ...] = ()
    spans: tuple[Span, ...] = ()
    source: Message | None = None
    small: bool = False  # one of several that belong side by side
    smooth: bool = False  # the reader may smooth what is not dashed


@dataclass(frozen=True)
class Moment:
    """One moment of `Moments`: where it is, and (component group, bytes) from the bottom."""

    label: Message
    part: Message
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Moments:
    title: Message
    moments: tuple[Moment, ...]
    levels: tuple[Level, ...] = ()
    source: Message | None = None


@dataclass(frozen=True)
class Dot:
    """One point of `Scatter`; `low` and `high` are the range of its y value, `note` what its table row says besides."""

    label: Cell
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: Cell = ""
    strong: bool = False
    size: float = 0.0  # share of the largest area; 0: as all others


@dataclass(frozen=True)
class Cloud:
    label: Cell
    dots: tuple[Dot, ...]
    colour: int = 0


@dataclass(frozen=True)
class Scatter:
    """Points on two axes, with lines and bands (x, low, high). `note_label` heads the points' notes in the table."""

    title: Message
    x: Axis
    y: Axis
    clouds: tuple[Cloud, ...]
    lines: tuple[tuple[Message, tuple[tuple[float, float], ...]], ...] = ()
    band: tuple[Message, tuple[tuple[float, float, float], ...]] | None = None
    levels: tuple[Level, ...] = ()
    note_label: Cell = ""
    source: Message | None = None


@dataclass(frozen=True)
class Rank:
    """One bar of `Ranks`, with the range of its value, what stands at its end, its tone, or a line's `colour`."""

    label: Cell
    value: float
    low: float | None = None
    high: float | None = None
    remark: Cell = ""
    tone: str = "plain"
    strong: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Ranks:
    """Horizontal bars of one quantity. `remark_label` heads the remarks at their ends, in the table."""

    title: Message
    axis: Axis
    ranks: tuple[Rank, ...]
    remark_label: Cell = ""
    levels: tuple[Level, ...] = ()
    source: Message | None = None
    numbers: Table | None = None  # where more is known than is shown


Picture = StackedBars | Curves | Moments | Scatter | Ranks
Block = Paragraph | Table | Verbatim | Figures | Picture


Place = Literal["terminal", "page"]  # a page: the HTML report, or the one that `foretrain serve` shows


@dataclass(frozen=True)
class Only:
    """A block that one place alone shows: a picture a page, what it replaces a terminal."""

    place: Place
    block: Block


@dataclass(frozen=True)
class Section:
    title: Message
    blocks: tuple[Block | Only, ...]

    def on(self, place: Place) -> tuple[Block, ...]:
        return tuple(
            block.block if isinstance(block, Only) else block
            for block in self.blocks
            if not isinstance(block, Only) or block.place == place
        )


@dataclass(frozen=True)
class Document:
    title: Message
    subtitle: Message
    sections: Sequence[Section]

    def on(self, place: Place) -> list[tuple[Message, tuple[Block, ...]]]:
        shown = ((section.title, section.on(place)) for section in self.sections)
        return [(title, blocks) for title, blocks in shown if blocks]


@dataclass(frozen=True)
class Row:
    """A named line of a `Screen`. `command`: words to be copied, on a line of their own behind the text. `optional`:
    left out of a long screen, the highest first; 0 stays. `short`: the same in one line, before that."""

    label: Message
    text: Cell = ""
    command: tuple[str, ...] = ()
    optional: int = 0
    short: Cell = ""


@dataclass(frozen=True)
class Screen:
    """A short answer: what matters in `most_lines`. `table`: one row a card, or a change, where there are several."""

    title: Message
    lead: tuple[Paragraph, ...]
    table: Table | None
    rows: tuple[Row, ...]
    most_lines: int = 12
