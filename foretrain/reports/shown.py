"""What `print(plan)` and a notebook show: the same screen as the command line."""

import io
from typing import Any

from foretrain.base.records import SHOWN
from foretrain.predict.plan import Plan
from foretrain.reports import text
from foretrain.reports.document import Document
from foretrain.reports.views import plan as plan_view

WIDTH = 96
_PRE = '<pre style="white-space:pre;overflow-x:auto;font-family:monospace">{code}</pre>'


def register() -> None:
    """Records show themselves from now on."""
    SHOWN[Plan] = lambda plan, as_html: _screen(_plan(plan), as_html)


def _plan(plan: Any) -> Document:
    return plan_view.document(plan)


def _screen(document: Document, as_html: bool) -> str:
    """The document as a terminal shows it, as plain text or as one coloured HTML element."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=WIDTH, record=True, highlight=False,
        force_terminal=as_html, color_system="truecolor" if as_html else None,
    )  # fmt: skip
    text.render(document, console)
    if as_html:
        return console.export_html(code_format=_PRE, inline_styles=True)
    return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())
