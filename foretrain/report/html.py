"""A Document as one self-contained HTML file: it opens offline, prints, and follows dark mode.

Pictures are drawn by Chart.js, which is put into the file; the numbers of every picture stand in a table beneath.
Every text goes through `escape`, and what the script reads is JSON without a way out of its tag.
"""

import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from foretrain.languages import current
from foretrain.messages import say
from foretrain.report.document import (
    Block,
    Cell,
    Document,
    Lines,
    Pairs,
    Paragraph,
    Quantity,
    StackedBars,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.report.palette import COLOURS, SERIES_COLOURS


def render(document: Document) -> str:
    """The page as text, in the language that is spoken."""
    files, language = resources.files("foretrain") / "report", current()
    pictures: list[dict[str, Any]] = []
    parts = []
    for section in document.sections:
        parts.append(f"<section><h2>{escape(section.title.text())}</h2>")
        parts += [_block(block, pictures) for block in section.blocks]
        parts.append("</section>")
    return Template((files / "page.html").read_text("utf-8")).substitute(
        lang=language.id,
        direction=language.direction,
        title=escape(document.title.text()),
        subtitle=escape(document.subtitle.text()),
        body="\n".join(parts),
        footer=escape(say("report.footer")),
        library=(files / "vendor" / "chart.umd.min.js").read_text("utf-8"),
        pictures=json.dumps(pictures).replace("<", "\\u003c"),
    )


def _block(block: Block, pictures: list[dict[str, Any]]) -> str:
    match block:
        case Paragraph(message=message, tone=tone):
            return f'<p class="{tone}">{escape(message.text())}</p>'
        case Table():
            return _table(block)
        case Verbatim(text=text):
            return f"<pre>{escape(text)}</pre>"
        case StackedBars():
            return _picture(
                block.title.text(),
                _stacked(block),
                _stacked_table(block),
                70 + 48 * len(block.bars),
                pictures,
            )
        case Lines():
            return _picture(block.title.text(), _lines(block), _lines_table(block), 320, pictures)
        case Pairs():
            return _picture(block.title.text(), _pairs(block), None, 70 + 42 * len(block.rows), pictures)


def _table(table: Table) -> str:
    def row(cells: tuple[Cell, ...], tag: str, tone: str = "plain") -> str:
        inner = "".join(
            f"<{tag}{' class=number' if i in table.numeric else ''}>{escape(cell_text(cell))}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f'<tr class="{tone}">{inner}</tr>'

    head = f"<thead>{row(table.columns, 'th')}</thead>" if table.columns else ""
    tones = table.tones or ("plain",) * len(table.rows)
    body = "".join(row(cells, "td", tone) for cells, tone in zip(table.rows, tones, strict=True))
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _picture(
    title: str, picture: dict[str, Any], table: Table | None, height: int, pictures: list[dict[str, Any]]
) -> str:
    picture["id"] = f"picture-{len(pictures)}"
    pictures.append(picture)
    behind = f"<details><summary>{escape(say('report.numbers'))}</summary>{_table(table)}</details>" if table else ""
    label = escape(title, quote=True)
    return (
        f'<div class="picture"><h3>{escape(title)}</h3><div class="canvas" style="height:{height}px">'
        f'<canvas id="{picture["id"]}" role="img" aria-label="{label}"></canvas></div>{behind}</div>'
    )


def _stacked(bars: StackedBars) -> dict[str, Any]:
    groups = list(dict.fromkeys(group for bar in bars.bars for group, _ in bar.parts))
    datasets = [
        {
            "label": say(f"group.{group}"),
            "data": [dict(bar.parts).get(group, 0) for bar in bars.bars],
            "backgroundColor": COLOURS[group],
        }
        for group in groups
    ]
    picture: dict[str, Any] = {
        "kind": "stacked", "format": "bytes", "labels": [cell_text(bar.label) for bar in bars.bars],
        "datasets": datasets,
    }  # fmt: skip
    if bars.limit_bytes is not None:
        picture["mark"] = {"axis": "x", "value": bars.limit_bytes, "label": say("axis.limit")}
        picture["high"] = bars.limit_bytes
    return picture


def _stacked_table(bars: StackedBars) -> Table:
    groups = list(dict.fromkeys(group for bar in bars.bars for group, _ in bar.parts))
    rows = tuple(
        (say(f"group.{group}"), *(Quantity(dict(bar.parts).get(group), "bytes") for bar in bars.bars))
        for group in groups
    )
    return Table(("", *(bar.label for bar in bars.bars)), rows, frozenset(range(1, len(bars.bars) + 1)))


def _lines(lines: Lines) -> dict[str, Any]:
    datasets = []
    for number, series in enumerate(lines.series):
        points = [{"x": x, "y": y} for x, y in zip(series.xs, series.ys, strict=True)]
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        datasets.append(
            {
                "label": cell_text(series.label), "data": points, "borderColor": colour, "backgroundColor": colour,
                "pointRadius": 3 if len(points) < 40 else 0, "borderWidth": 1.5,
            }
        )  # fmt: skip
    values = [y for series in lines.series for y in series.ys] or [0.0]
    picture: dict[str, Any] = {
        "kind": "lines", "format": "number", "datasets": datasets, "x": lines.x_label.text(),
        "y": lines.y_label.text(), "low": min(0.0, *values), "high": max(values),
    }  # fmt: skip
    if lines.level is not None:
        picture["mark"] = {"axis": "y", "value": lines.level[1], "label": lines.level[0].text()}
    return picture


def _lines_table(lines: Lines) -> Table:
    """The points of the series with the fewest: of a loss curve, those of the evaluations."""
    shortest = min(lines.series, key=lambda series: len(series.xs))
    rows = tuple((f"{x:,.0f}", f"{y:.4f}") for x, y in zip(shortest.xs, shortest.ys, strict=True))
    return Table((lines.x_label, shortest.label), rows, frozenset({0, 1}))


def _pairs(pairs: Pairs) -> dict[str, Any]:
    names = (say("axis.predicted"), say("axis.measured"))
    datasets = [
        {"label": name, "data": [row[i + 1] for row in pairs.rows], "backgroundColor": SERIES_COLOURS[i]}
        for i, name in enumerate(names)
    ]
    return {
        "kind": "pairs", "format": pairs.format, "labels": [cell_text(row[0]) for row in pairs.rows],
        "datasets": datasets, "log": True, "least": min(min(row[1:]) for row in pairs.rows),
    }  # fmt: skip
