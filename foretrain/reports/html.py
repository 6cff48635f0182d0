"""A Document as one self-contained HTML file: it opens offline, prints, and follows dark mode.

Pictures are drawn by Chart.js, which is put into the file; the numbers of every picture stand in a table beneath.
Every text goes through `escape`, and what the script reads is JSON without a way out of its tag.
"""

import json
from html import escape
from importlib import resources
from itertools import count, groupby
from string import Template
from typing import Any

from foretrain.base.messages import current, printable, say
from foretrain.reports.charts import chart
from foretrain.reports.document import (
    Block,
    Cell,
    Curves,
    Document,
    Figures,
    Message,
    Paragraph,
    Picture,
    Quantity,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.reports.numbers import behind
from foretrain.reports.palette import LINES_DARK, LINES_LIGHT

SIGNS = {"good": "✓", "warn": "!", "bad": "✗"}
SCRIPT_TEXTS = ("report.light", "report.dark", "report.by_keys")


def render(document: Document) -> str:
    """The page as text, in the language that is spoken."""
    files, language = resources.files("foretrain") / "reports", current()
    page = _Page()
    sections = document.on("page")
    body = [page.section(number, title, blocks) for number, (title, blocks) in enumerate(sections)]
    data = {
        "pictures": page.pictures, "light": LINES_LIGHT, "dark": LINES_DARK,
        "texts": {id.rpartition(".")[2]: say(id) for id in SCRIPT_TEXTS},
    }  # fmt: skip
    return Template((files / "page.html").read_text("utf-8")).substitute(
        lang=escape(language.id, quote=True),
        direction=escape(language.direction, quote=True),
        title=_text(document.title.text()),
        subtitle=_text(document.subtitle.text()),
        contents=page.contents([title for title, _ in sections]),
        body="\n".join(body),
        footer=escape(say("report.footer")),
        no_script=escape(say("report.no_script")),
        theme=escape(say("report.dark")),
        style=(files / "report.css").read_text("utf-8"),
        library=(files / "vendor" / "chart.umd.min.js").read_text("utf-8"),
        script=script(),
        data=script_json(data),
    )


def script() -> str:
    """What draws, then what makes it draw here; a script in a page exports nothing."""
    files = resources.files("foretrain") / "reports"
    draws = (files / "draw.js").read_text("utf-8").partition("\nexport ")[0]
    return f"{draws}\n{(files / 'report.js').read_text('utf-8')}"


def script_json(value: Any) -> str:
    """JSON that cannot end the script that it stands in, nor begin a comment there."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _text(text: str) -> str:
    return escape(printable(text))


class _Page:
    """What is gathered while a document is written: its pictures, in order."""

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
        """A table in a frame of its own that scrolls, by keys too."""
        head = _row(table, table.columns, "plain", head=True) if table.columns else ""
        tones = table.tones or ("plain",) * len(table.rows)
        body = "".join(_row(table, cells, tone) for cells, tone in zip(table.rows, tones, strict=True))
        label = escape(f"{printable(name)} ({next(self._regions)})", quote=True)
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
            f"{f'<thead>{head}</thead>' if head else ''}<tbody>{body}</tbody></table></div>"
        )

    def picture(self, picture: Picture) -> str:
        id, title = f"picture-{len(self.pictures)}", picture.title.text()
        self.pictures.append({"id": id, **chart(picture)})
        source = getattr(picture, "source", None)
        said = f'<p class="source">{_text(source.text())}</p>' if source else ""
        switch = _switches(id, picture) if isinstance(picture, Curves) else ""
        return (
            f'<figure class="picture"><figcaption><h3>{_text(title)}</h3>{said}</figcaption>{switch}'
            f'<div class="canvas"><canvas id="{id}" role="img" tabindex="0" aria-label="{_text(title)}"></canvas></div>'
            f'<p class="said" id="{id}-said" aria-live="polite"></p>'
            f"<details><summary>{escape(say('report.numbers'))}</summary>{self.table(behind(picture), title)}</details>"
            "</figure>"
        )


def _switches(id: str, picture: Curves) -> str:
    """What the reader may choose: the axis, and how smooth the curves are."""
    axis = _switch(id, picture) if len(picture.axes) > 1 else ""
    if not picture.smooth:
        return axis
    return (
        f'{axis}<label class="smooth">{escape(say("report.smoothing"))} <input type="range" name="{id}-smooth" min="0"'
        f' max="0.99" step="0.01" value="0" autocomplete="off"><output>0</output></label>'
    )


def _switch(id: str, picture: Curves) -> str:
    """Which axis the curves are laid over: radio buttons, so that keys work as everywhere."""
    buttons = "".join(
        f'<label><input type="radio" name="{id}-axis" value="{i}"{" checked" if i == 0 else ""}>'
        f"<span>{_text(axis.label.text())}</span></label>"
        for i, axis in enumerate(picture.axes)
    )
    return f'<fieldset class="switch"><legend>{escape(say("report.over"))}</legend>{buttons}</fieldset>'


def _figures(figures: Figures) -> str:
    items = "".join(
        f"<div><dt>{_text(item.label.text())}</dt><dd><b>{_text(cell_text(item.value))}</b>"
        + (f"<span>{_text(ends)}</span>" if (ends := cell_text(item.range)) else "")
        + f"<small>{_text(cell_text(item.source))}</small></dd></div>"
        for item in figures.items
    )
    return f'<dl class="figures">{items}</dl>'


def _row(table: Table, cells: tuple[Cell, ...], tone: str, *, head: bool = False) -> str:
    """Heads of columns, and of rows where the first column is their name; an empty head is a plain cell."""
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
