"""A Document as one self-contained HTML file, and as the page's JSON; every text goes through `escape`."""

import json
from html import escape
from importlib import resources
from itertools import count, groupby
from string import Template
from typing import Any

from foretrain.base.messages import current, printable, say
from foretrain.reports import charts
from foretrain.reports.document import (
    Block,
    Cell,
    Curves,
    Document,
    Figure,
    Figures,
    Message,
    Paragraph,
    Picture,
    Place,
    Quantity,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.reports.numbers import behind
from foretrain.reports.plots import markup

SIGNS = {"good": "✓", "warn": "!", "bad": "✗"}


def render(document: Document) -> str:
    files, language = resources.files("foretrain") / "reports", current()
    page = _Page()
    sections = document.on("page")
    body = [page.section(number, title, blocks) for number, (title, blocks) in enumerate(sections)]
    texts = {name: say(f"report.{name}") for name in ("light", "dark")}
    return Template((files / "page.html").read_text("utf-8")).substitute(
        lang=escape(language.id, quote=True),
        direction=escape(language.direction, quote=True),
        title=_text(document.title.text()),
        subtitle=_text(document.subtitle.text()),
        contents=page.contents([title for title, _ in sections]),
        body="\n".join(body),
        footer=escape(say("report.footer")),
        theme=escape(say("report.dark")),
        style="".join((files / name).read_text("utf-8") for name in ("report.css", "chart.css")),
        script=script(),
        data=script_json({"pictures": page.pictures, "texts": texts}),
    )


def script() -> str:
    """What pictures do, then what makes them do it here; a script in a page exports nothing."""
    files = resources.files("foretrain") / "reports"
    chart = (files / "chart.js").read_text("utf-8").partition("\nexport ")[0]
    return f"{chart}\n{(files / 'report.js').read_text('utf-8')}"


def script_json(value: Any) -> str:
    """JSON that cannot end the script that it stands in, nor begin a comment there."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _text(text: str) -> str:
    return escape(printable(text))


class _Page:
    def __init__(self) -> None:
        self.pictures: list[dict[str, Any]] = []
        self._regions = count(1)

    def contents(self, titles: list[Message]) -> str:
        if len(titles) < 4:
            return ""
        items = "".join(
            f'<li><a href="#section-{number}">{_text(title.text())}</a></li>' for number, title in enumerate(titles)
        )
        return f'<nav aria-label="{escape(say("report.contents"), quote=True)}"><ul>{items}</ul></nav>'

    def section(self, number: int, title: Message, blocks: tuple[Block, ...]) -> str:
        name = title.text()
        parts = [f'<section id="section-{number}" class="{"first" if number == 0 else "later"}">']
        parts.append(f"<h2>{_text(name)}</h2>")
        for small, group in groupby(blocks, key=lambda block: isinstance(block, Curves) and block.small):
            inner = [self.block(block, name) for block in group]
            parts += ['<div class="grid">', *inner, "</div>"] if small else inner
        return "\n".join([*parts, "</section>"])

    def block(self, block: Block, section: str) -> str:
        match block:
            case Paragraph(message=message, tone=tone):
                sign = f'<span class="sign" aria-hidden="true">{SIGNS[tone]}</span>' if tone in SIGNS else ""
                return f'<p class="{tone}">{sign}<span>{_text(message.text())}</span></p>'
            case Table():
                return self.table(block, section)
            case Verbatim(text=text):
                label = escape(section, quote=True)
                return f'<pre tabindex="0" role="region" aria-label="{label}">{_text(text)}</pre>'
            case Figures():
                return _figures(block)
            case _:
                return self.picture(block)

    def table(self, table: Table, name: str) -> str:
        head = _row(table, table.columns, "plain", head=True) if table.columns else ""
        tones = table.tones or ("plain",) * len(table.rows)
        body = "".join(_row(table, cells, tone) for cells, tone in zip(table.rows, tones, strict=True))
        label = escape(f"{printable(name)} ({next(self._regions)})", quote=True)
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
            f"{f'<thead>{head}</thead>' if head else ''}<tbody>{body}</tbody></table></div>"
        )

    def picture(self, picture: Picture) -> str:
        made, title = charts.chart(picture), picture.title.text()
        drawn = charts.figure(picture, made, f"picture-{len(self.pictures)}")
        self.pictures.append(charts.pointed(made))
        table = self.table(behind(picture), title)
        numbers = f"<details><summary>{escape(say('report.numbers'))}</summary>{table}</details>"
        return markup(drawn).removesuffix("</figure>") + numbers + "</figure>"


def _figures(figures: Figures) -> str:
    items = "".join(
        f"<div><dt>{_text(item.label.text())}</dt><dd><b>{_text(cell_text(item.value))}</b>"
        + (f"<span>{_text(ends)}</span>" if (ends := cell_text(item.range)) else "")
        + f"<small>{_text(cell_text(item.source))}</small></dd></div>"
        for item in figures.items
    )
    return f'<dl class="figures">{items}</dl>'


def _row(table: Table, cells: tuple[Cell, ...], tone: str, *, head: bool = False) -> str:
    inner = []
    for i, cell in enumerate(cells):
        text = _text(cell_text(cell))
        number = ' class="number"' if i in table.numeric else ""
        if head and text:
            inner.append(f'<th scope="col"{number}>{text}</th>')
        elif i == 0 and not head and 0 not in table.numeric and len(cells) > 1 and text:
            inner.append(f'<th scope="row">{text}</th>')
        else:
            inner.append(f"<td{number or (' class=value' if isinstance(cell, Quantity) else '')}>{text}</td>")
    return f'<tr class="{tone}">{"".join(inner)}</tr>'


def document_json(document: Document, place: Place = "page") -> dict[str, Any]:
    return {
        "title": printable(document.title.text()), "subtitle": printable(document.subtitle.text()),
        "sections": [
            {"title": title.text(), "blocks": [block_json(block) for block in blocks]}
            for title, blocks in document.on(place)
        ],
    }  # fmt: skip


def block_json(block: Block) -> dict[str, Any]:
    match block:
        case Paragraph(message=message, tone=tone):
            return {"kind": "paragraph", "text": printable(message.text()), "tone": tone}
        case Verbatim(text=text):
            return {"kind": "verbatim", "text": printable(text)}
        case Table():
            rows = [[printable(cell_text(cell)) for cell in row] for row in block.rows]
            columns = [cell_text(cell) for cell in block.columns]
            tones = list(block.tones) or ["plain"] * len(rows)
            return {"kind": "table", "columns": columns, "rows": rows, "numeric": sorted(block.numeric), "tones": tones}
        case Figures():
            return {"kind": "figures", "items": [_figure_json(one) for one in block.items]}
        case _:
            made = charts.chart(block)
            return {
                "kind": "chart", "title": printable(block.title.text()), "small": made.small,
                "figure": charts.figure(block, made, "picture"), "picture": charts.pointed(made),
                "numbers": block_json(behind(block)),
            }  # fmt: skip


def _figure_json(figure: Figure) -> dict[str, str]:
    label, shown = figure.label, (figure.value, figure.range, figure.source)
    value, ends, source = (printable(cell_text(cell)) for cell in shown)
    id = label.id.rpartition(".")[2]
    return {"id": id, "label": label.text(), "value": value, "range": ends, "source": source}
