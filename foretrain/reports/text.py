"""A Document in a terminal, with rich: tables, stacked bars, wrapped text. Plain when the output is not a terminal."""

import shlex
import textwrap
from dataclasses import replace

from rich.align import Align
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from foretrain.base.messages import FSI, LRI, PDI, RLI, printable, runs_rightwards, say
from foretrain.base.units import format_bytes
from foretrain.reports.charts import COLOURS
from foretrain.reports.document import (
    Bar,
    Block,
    Curves,
    Document,
    Figures,
    Moment,
    Moments,
    Paragraph,
    Picture,
    Row,
    Screen,
    StackedBars,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.reports.numbers import behind, value_cell

# The terminal in a language that runs from right to left: lines end on the right, tables begin there.
#
# rich knows nothing of directions, and marks of direction hold for one line only: so lines are broken first, and each
# then gets its own marks. A terminal that obeys them shows each cell in its order and leaves the columns where they
# are; one that does not lacks nothing but the order within a line. What is a picture (bars) stays as it is.


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
    for sign in line:
        if sign in LRI + RLI + FSI:
            before += sign
        elif sign == PDI:
            before = before[:-1]
    return before


def facing(text: Text) -> RenderableType:
    return Rightward(text) if runs_rightwards() else text


def mirrored(table: RichTable) -> RenderableType:
    """A table with its first column on the right, where the language runs from there."""
    if not runs_rightwards():
        return table
    made = RichTable(
        box=None, show_header=table.show_header, header_style=table.header_style, padding=(0, 0, 0, 2), pad_edge=False
    )
    for column in reversed(table.columns):
        made.add_column(_cell(column.header), justify="right", overflow="fold")
    rows = zip(*(list(column.cells) for column in reversed(table.columns)), strict=True)
    for row, source in zip(rows, table.rows, strict=True):
        made.add_row(*(_cell(cell) for cell in row), style=source.style)
    return Align.right(made)


def _cell(cell: RenderableType) -> RenderableType:
    if isinstance(cell, str):
        cell = Text(cell)
    return Rightward(cell) if isinstance(cell, Text) else cell


STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "strong": "bold", "plain": ""}
GROUP_LETTERS = {
    "weights": "w", "gradients": "g", "optimizer": "o", "weight_copies": "c",
    "activations": "a", "logits": "l", "temporaries": "t", "overhead": "x", "everything_else": "e",
    "python": "p", "kept": "k", "vllm": "v",
}  # fmt: skip
_BAR_WIDTH = 60
MOST_ROWS = 20  # of a picture's numbers; a terminal has no room for more
PROSE_WIDTH = 100  # longer lines are hard to read
INDENT = 2
GAP = 2  # blanks between columns
TEXT_SHARE = 0.6  # of its longest cell: so narrow may a column of text become before another one is left out
SHORT_CELL = 16  # text that does not break
LONG_WORD = 40  # a path, which may be broken


class Trimmed:
    """A renderable without the blanks at the ends of its lines, which rich pads to the width of a column."""

    def __init__(self, renderable: RenderableType, width: int | None = None) -> None:
        self._renderable, self._width = renderable, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._width is not None:
            options = options.update_width(min(self._width, options.max_width))
        for line in console.render_lines(self._renderable, options, pad=False):
            while line and not line[-1].text.strip(" "):
                line.pop()
            yield from line[:-1]
            if line:
                yield Segment(line[-1].text.rstrip(" "), line[-1].style, line[-1].control)
            yield Segment.line()


def render(document: Document, console: Console) -> None:
    title, subtitle = _text(document.title.text(), style="bold"), _text(document.subtitle.text(), style="dim")
    _print(console, facing(Text.assemble(title, "  ", subtitle)), PROSE_WIDTH)
    for heading, blocks in document.on("terminal"):
        console.print()
        _print(console, facing(_text(heading.text(), style="bold underline")), PROSE_WIDTH)
        for block in blocks:
            prose = isinstance(block, Paragraph) or (isinstance(block, Table) and not block.columns)
            width = PROSE_WIDTH if prose else None
            _print(console, Padding(_block(block, console), (0, 0, 0, INDENT)), width)


def render_screen(screen: Screen, console: Console) -> None:
    """Print a short answer; until it has `most_lines`, rows become short, then optional rows go, one by one."""
    width, kept = min(PROSE_WIDTH, console.width), list(screen.rows)
    while True:
        parts = [facing(_text(screen.title.text(), style="bold")), *(_block(p, console) for p in screen.lead)]
        if screen.table is not None:
            parts.append(Padding(mirrored(_table(screen.table, width - INDENT)), (0, 0, 0, INDENT)))
        parts.append(Padding(mirrored(_rows(kept, width - INDENT)), (0, 0, 0, INDENT)))
        lines = sum(len(console.render_lines(Trimmed(part, width), pad=False)) for part in parts)
        last = max(kept, key=lambda row: row.optional, default=None)
        if lines > screen.most_lines and any(row.short for row in kept):
            kept = [replace(row, text=row.short or row.text, short="") for row in kept]
        elif lines <= screen.most_lines or last is None or not last.optional:
            break
        else:
            kept.remove(last)
    for part in parts:
        _print(console, part, width)


def _rows(rows: list[Row], width: int) -> RichTable:
    rich = RichTable(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    labels = [printable(row.label.text()) for row in rows]
    rich.add_column(style="dim", no_wrap=True)
    rich.add_column(overflow="fold")
    room = width - GAP - max(map(cell_len, labels), default=0)
    for label, row in zip(labels, rows, strict=True):
        body = _text(cell_text(row.text))
        if row.command:
            body = Text("\n").join([*([body] if body else []), Text(_command(row.command, room), style="bold")])
        rich.add_row(label, body)
    return rich


def _command(words: tuple[str, ...], width: int) -> str:
    lines: list[str] = []
    for word in map(shlex.quote, map(printable, words)):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n".join(lines)


def _print(console: Console, renderable: RenderableType, width: int | None = None) -> None:
    console.print(Trimmed(renderable, width), end="")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _block(block: Block, console: Console) -> RenderableType:
    match block:
        case Paragraph(message=message, tone=tone):
            style = STYLES[tone] or ("dim" if message.id.startswith("source") else "")
            return facing(_text(message.text(), style=style))
        case Table():
            return mirrored(_table(block, console.width - 2))
        case StackedBars():
            return _bars(block, console)
        case Verbatim(text=text):
            return _text(text)
        case _:
            return _numbers(block, console.width - 2)


def _numbers(block: Figures | Picture, width: int) -> RenderableType:
    if isinstance(block, Curves):
        return _curves(block)
    table = behind(block)
    if isinstance(block, Moments):
        highest = max(block.moments, key=lambda moment: sum(size for _, size in moment.parts))
        return _text(f"{block.title.text()}: {highest.label.text()}, {_highest(highest)}")
    if len(table.rows) > MOST_ROWS:
        table = replace(table, rows=table.rows[:MOST_ROWS], tones=())
    last = len(table.columns) - 1
    return _table(replace(table, optional=(last,)), width)


def _highest(moment: Moment) -> str:
    return format_bytes(sum(size for _, size in moment.parts))


def _curves(curves: Curves) -> Text:
    parts = (
        f"{cell_text(trace.label)} {' → '.join(cell_text(value_cell(v, curves.y.format)) for v in ends)}"
        for trace in curves.traces
        if trace.values and (ends := (trace.values[0], trace.values[-1]))
    )
    return _text(f"{curves.title.text()}: " + "; ".join(parts))


def _least_width(table: Table, column: int) -> int:
    cells = [cell_text(row[column]) for row in table.rows if column < len(row)]
    longest = max(map(len, cells), default=0)
    if column not in table.numeric:
        longest = max(round(TEXT_SHARE * longest), min(longest, SHORT_CELL))
    return max(longest, _longest_word(table, column))


def _longest_word(table: Table, column: int) -> int:
    rows = [table.columns, *table.rows] if table.columns else table.rows
    words = [word for row in rows if column < len(row) for word in cell_text(row[column]).split()]
    return max((len(word) for word in words if len(word) < LONG_WORD), default=0)


def _fitting(table: Table, width: int) -> list[int]:
    count = len(table.columns) or max((len(row) for row in table.rows), default=0)
    kept = list(range(count))
    least = [GAP + _least_width(table, column) for column in kept]
    for column in table.optional:
        if sum(least[i] for i in kept) > width:
            kept.remove(column)
    return kept


def _head(table: Table, column: int, narrow: bool) -> str:
    head = printable(cell_text(table.columns[column])) if table.columns else ""
    if not narrow or column not in table.numeric or runs_rightwards():
        return head
    return "\n".join(textwrap.wrap(head, _least_width(table, column), break_long_words=False))


def _widths(natural: list[int], least: list[int], width: int) -> list[int] | None:
    excess, spare = sum(natural) + GAP * (len(natural) - 1) - width, sum(natural) - sum(least)
    if excess <= 0 or excess > spare:
        return None
    return [wide - -(-excess * (wide - few) // spare) for wide, few in zip(natural, least, strict=True)]


def _blocks(table: Table, kept: list[int]) -> RichTable:
    """Return a table as a block of lines for each row, where its columns do not fit beside one another."""
    rich = RichTable(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    for number, row in enumerate(table.rows):
        if number:
            rich.add_row()
        for i in kept[: len(row)]:
            style = STYLES[table.tones[number] if table.tones else "plain"]
            rich.add_row(_text(cell_text(table.columns[i])), _text(cell_text(row[i])), style=style)
    return rich


def _table(table: Table, width: int) -> RichTable:
    rich = RichTable(
        box=None, show_header=bool(table.columns), header_style="dim", padding=(0, GAP, 0, 0), pad_edge=False
    )
    kept = _fitting(table, width)
    rows = [*([table.columns] if table.columns else []), *table.rows]
    natural = [max((cell_len(cell_text(row[i])) for row in rows if i < len(row)), default=0) for i in kept]
    narrow = sum(natural) + GAP * (len(kept) - 1) > width
    if narrow and not runs_rightwards():  # then heads of numbers are broken
        natural = [
            _least_width(table, i) if i in table.numeric else wide for i, wide in zip(kept, natural, strict=True)
        ]
    least = [  # a number is never broken
        wide if i in table.numeric else min(wide, _least_width(table, i)) for i, wide in zip(kept, natural, strict=True)
    ]
    words = [wide if i in table.numeric else _longest_word(table, i) for i, wide in zip(kept, least, strict=True)]
    if table.columns and sum(words) + GAP * (len(kept) - 1) > width:
        return _blocks(table, kept)
    widths = _widths(natural, least, width)
    for place, i in enumerate(kept):
        numeric = i in table.numeric
        rich.add_column(
            _head(table, i, narrow),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric or natural[place] == words[place],
            width=widths[place] if widths and table.columns else None,
        )
    for number, row in enumerate(table.rows):
        tone = table.tones[number] if table.tones else "plain"
        rich.add_row(*(_text(cell_text(row[i])) for i in kept if i < len(row)), style=STYLES[tone])
    return rich


def _bars(bars: StackedBars, console: Console) -> RenderableType:
    scale = max([sum(size for _, size in bar.parts) for bar in bars.bars] + [bars.limit_bytes or 0]) or 1
    colours = console.color_system is not None
    width = max(20, min(_BAR_WIDTH, console.width - 28))
    mark = None if bars.limit_bytes is None else round(bars.limit_bytes / scale * width)
    rows = []
    for bar in bars.bars:
        line = _text(f"{cell_text(bar.label):<10} ")
        for char, style in _cells(bar, scale / width, mark, colours):
            line.append(char, style=style if colours else "")
        line.append(f" {format_bytes(sum(size for _, size in bar.parts))}")
        rows.append(line)
    return Group(*rows, *_legend(bars, colours, min(console.width, PROSE_WIDTH) - INDENT))


def _legend(bars: StackedBars, colours: bool, width: int) -> list[Text]:
    entries = []
    for group in dict.fromkeys(group for bar in bars.bars for group, _ in bar.parts):
        sign = ("█ ", COLOURS[group]) if colours else f"{GROUP_LETTERS[group]} = "
        entries.append(Text.assemble(sign, say(f"group.{group}")))
    if bars.limit_bytes is not None:
        entries.append(Text(f"│ {say('axis.limit')} {format_bytes(bars.limit_bytes)}"))
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(Text(" " * 11).append_text(entry))
    return lines


def _cells(bar: Bar, bytes_per_cell: float, mark: int | None, colours: bool) -> list[tuple[str, str]]:
    cells: list[tuple[str, str]] = []
    edge = 0.0
    for group, size in bar.parts:
        start, edge = round(edge), edge + size / bytes_per_cell
        cells += [("█" if colours else GROUP_LETTERS[group], COLOURS[group])] * (round(edge) - start)
    if mark is not None:
        cells += [(" ", "")] * (mark + 1 - len(cells))
        cells[mark] = ("│", "bold")
    return cells
