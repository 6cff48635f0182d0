"""What `print(record)` and a notebook show: the text of the command line, and in a notebook the report's pictures."""

import io

from foretrain.app.finetune import advised
from foretrain.base.messages import printable
from foretrain.base.records import SHOWN, Record
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.reports import charts, text
from foretrain.reports.document import Curves, Document, StackedBars
from foretrain.reports.plots import markup, node
from foretrain.reports.views import VIEWS, document_of

PICTURE_WIDTH = 720


def svg(picture: StackedBars | Curves) -> str:
    """A picture over its first axis as an SVG element with its legend; "" of curves without values."""
    made = charts.chart(picture)
    if not made.views[0].stops:
        return ""
    drawn = made.views[0].draw(PICTURE_WIDTH).svg()
    style = "max-width:100%;height:auto;display:block;font:12px system-ui,sans-serif"
    more = {"width": str(PICTURE_WIDTH), "role": "img", "aria-label": printable(picture.title.text()), "style": style}
    keys = [node("span", key, f" {printable(label)} \u2003", style="white-space:nowrap") for label, key in made.series]
    for each in (drawn, *(key for _, key in made.series)):
        each[1]["xmlns"] = "http://www.w3.org/2000/svg"
    drawn[1] = {name: value for name, value in drawn[1].items() if name != "aria-hidden"} | more
    legend = node("div", *keys, style=f"max-width:{PICTURE_WIDTH}px;font:12px system-ui,sans-serif")
    return markup(node("div", drawn, legend))


WIDTH = 96
_PRE = '<pre style="white-space:pre;overflow-x:auto;font-family:monospace">{code}</pre>'


def register() -> None:
    SHOWN.update({name: _shown for name, view in VIEWS.items() if view.alone})  # at once: threads may ask


def whole(record: Record) -> Document:
    """Return all that is known of a record, and of a plan what to change."""
    return document_of(record, *((advised(record),) if isinstance(record, FineTunePlan | InferencePlan) else ()))


def _shown(record: Record, as_html: bool) -> str:
    found = whole(record)
    screen = _screen(found, as_html)
    if not as_html:
        return screen
    pictures = [
        svg(block) for _, blocks in found.on("page") for block in blocks if isinstance(block, StackedBars | Curves)
    ]
    return "\n".join([screen, *filter(None, pictures)])


def _screen(document: Document, as_html: bool) -> str:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=WIDTH, record=True, highlight=False,
        force_terminal=as_html, color_system="truecolor" if as_html else None,
    )  # fmt: skip
    text.render(document, console)
    if as_html:
        return console.export_html(code_format=_PRE, inline_styles=True)
    return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())
