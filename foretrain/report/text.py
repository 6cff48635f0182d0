"""A Document in a terminal, with rich: tables, stacked bars, wrapped text. Plain when the output is not a terminal."""

from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from foretrain.bidi import runs_rightwards
from foretrain.messages import printable, say
from foretrain.report.document import (
    Bar,
    Block,
    Curves,
    Document,
    Figures,
    Lines,
    Moment,
    Moments,
    NewPicture,
    Pairs,
    Paragraph,
    StackedBars,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.report.numbers import behind, value_cell
from foretrain.report.palette import COLOURS
from foretrain.report.rightward import facing, mirrored
from foretrain.units import format_bytes

STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "strong": "bold", "plain": ""}
GROUP_LETTERS = {
    "weights": "w", "gradients": "g", "optimizer": "o", "weight_copies": "c",
    "activations": "a", "logits": "l", "temporaries": "t", "overhead": "x", "everything_else": "e",
}  # fmt: skip
_BAR_WIDTH = 60
MOST_ROWS = 20  # of a picture's numbers; a terminal is no place for more


def render(document: Document, console: Console) -> None:
    """Print the document."""
    title, subtitle = _text(document.title.text(), style="bold"), _text(document.subtitle.text(), style="dim")
    if runs_rightwards():
        console.print(facing(Text.assemble(title, "  ", subtitle)))
    else:
        console.print(title, end="  ")
        console.print(subtitle)
    for section in document.sections:
        console.print()
        console.print(facing(_text(section.title.text(), style="bold underline")))
        for block in section.blocks:
            console.print(Padding(_block(block, console), (0, 0, 0, 2)))


def _text(text: str, style: str = "") -> Text:
    """Text for the terminal; what names and samples could smuggle in is taken out."""
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
        case Pairs():
            return mirrored(_pairs(block))
        case Lines():
            return _lines(block)
        case Verbatim(text=text):
            return _text(text)
        case _:
            return _numbers(block, console.width - 2)


def _numbers(block: Figures | NewPicture, width: int) -> RenderableType:
    """A picture as its numbers, where they are few; curves by their ends, one step by its highest moment."""
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
    """First and last value of each curve."""
    parts = (
        f"{cell_text(trace.label)} {' → '.join(cell_text(value_cell(v, curves.y.format)) for v in ends)}"
        for trace in curves.traces
        if trace.values and (ends := (trace.values[0], trace.values[-1]))
    )
    return _text(f"{curves.title.text()}: " + "; ".join(parts))


def _fitting(table: Table, width: int) -> list[int]:
    """The columns that are shown: optional ones go, one by one, while the table is too wide."""
    count = len(table.columns) or max((len(row) for row in table.rows), default=0)
    kept = list(range(count))
    rows = [*([table.columns] if table.columns else []), *table.rows]

    def needs() -> int:
        return sum(2 + max((len(cell_text(row[i])) for row in rows if i < len(row)), default=0) for i in kept)

    for column in table.optional:
        if needs() > width:
            kept.remove(column)
    return kept


def _table(table: Table, width: int) -> RichTable:
    rich = RichTable(
        box=None, show_header=bool(table.columns), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False
    )
    kept = _fitting(table, width)
    for i in kept:
        head = printable(cell_text(table.columns[i])) if table.columns else ""
        numeric = i in table.numeric
        rich.add_column(head, justify="right" if numeric else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        tone = table.tones[number] if table.tones else "plain"
        rich.add_row(*(_text(cell_text(row[i])) for i in kept if i < len(row)), style=STYLES[tone])
    return rich


def _bars(bars: StackedBars, console: Console) -> RenderableType:
    """Bars to one scale, with a mark at the limit; letters stand for colours where there are none."""
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
    legend = Text(" " * 11)
    for group in dict.fromkeys(group for bar in bars.bars for group, _ in bar.parts):
        legend.append("█ " if colours else f"{GROUP_LETTERS[group]} = ", style=COLOURS[group] if colours else "")
        legend.append(say(f"group.{group}") + "   ")
    if bars.limit_bytes is not None:
        legend.append(f"│ {say('axis.limit')} {format_bytes(bars.limit_bytes)}")
    return Group(*rows, legend)


def _cells(bar: Bar, bytes_per_cell: float, mark: int | None, colours: bool) -> list[tuple[str, str]]:
    """One (character, style) for each column of a bar; the limit's mark stands on top of it."""
    cells: list[tuple[str, str]] = []
    edge = 0.0
    for group, size in bar.parts:
        start, edge = round(edge), edge + size / bytes_per_cell
        cells += [("█" if colours else GROUP_LETTERS[group], COLOURS[group])] * (round(edge) - start)
    if mark is not None:
        cells += [(" ", "")] * (mark + 1 - len(cells))
        cells[mark] = ("│", "bold")
    return cells


def _pairs(pairs: Pairs) -> RichTable:
    from foretrain.report.document import Quantity

    rows = tuple(
        (label, Quantity(predicted, pairs.format), Quantity(measured, pairs.format))
        for label, predicted, measured in pairs.rows
    )
    return _table(Table(("", say("axis.predicted"), say("axis.measured")), rows, frozenset({1, 2})), 10**6)


def _lines(lines: Lines) -> Text:
    """First and last value of each line: a terminal is no place for a curve."""
    parts = (f"{cell_text(s.label)} {s.ys[0]:.4f} → {s.ys[-1]:.4f}" for s in lines.series if s.ys)
    return Text("; ".join(parts))
