"""The terminal in a language that runs from right to left: lines end on the right, tables begin there.

rich knows nothing of directions, and marks of direction hold for one line only: so lines are broken first, and each
then gets its own marks. A terminal that obeys them shows each cell in its order and leaves the columns where they are;
one that does not lacks nothing but the order within a line. What is a picture (bars) stays as it is.
"""

from rich.align import Align
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from foretrain.base.bidi import FSI, LRI, PDI, RLI, runs_rightwards


class Rightward:
    """Text whose lines are right-aligned and marked one by one."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, open_marks = options.max_width, ""
        for line in self._text.wrap(console, width, justify="left", overflow="fold"):
            line.rstrip()
            begin, open_marks = open_marks, _left_open(open_marks, line.plain)
            blanks = " " * max(0, width - line.cell_len)
            yield Text.assemble(blanks, RLI + begin, line, PDI * (len(open_marks) + 1), no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)


def _left_open(before: str, line: str) -> str:
    """The marks that are still open at the end of a line."""
    for sign in line:
        if sign in LRI + RLI + FSI:
            before += sign
        elif sign == PDI:
            before = before[:-1]
    return before


def facing(text: Text) -> RenderableType:
    """A paragraph as the language that is spoken begins its lines."""
    return Rightward(text) if runs_rightwards() else text


def mirrored(table: Table) -> RenderableType:
    """A table with its first column on the right, where the language runs from there."""
    if not runs_rightwards():
        return table
    made = Table(
        box=None, show_header=table.show_header, header_style=table.header_style, padding=(0, 0, 0, 2), pad_edge=False
    )
    for column in reversed(table.columns):
        made.add_column(_cell(column.header), justify="right", overflow="fold")
    rows = zip(*(list(column.cells) for column in reversed(table.columns)), strict=True)
    for row, told in zip(rows, table.rows, strict=True):
        made.add_row(*(_cell(cell) for cell in row), style=told.style)
    return Align.right(made)


def _cell(cell: RenderableType) -> RenderableType:
    if isinstance(cell, str):
        cell = Text(cell)
    return Rightward(cell) if isinstance(cell, Text) else cell
