"""What `print(record)` and a notebook show: the text of the command line, and in a notebook the report's pictures."""

import io
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from foretrain.app.finetune import advised
from foretrain.base.records import SHOWN
from foretrain.reports import text
from foretrain.reports.document import Curves, Document, StackedBars
from foretrain.reports.svg import svg
from foretrain.reports.views.finetune import whole

WIDTH = 96
_PRE = '<pre style="white-space:pre;overflow-x:auto;font-family:monospace">{code}</pre>'


# Records by name, and the view that makes a document of each.
VIEWS = {
    "Plan": "plan", "Comparison": "compare", "RunExplanation": "run_explain", "LogExplanation": "log",
    "SnapshotAnalysis": "snapshot", "ClusterPlan": "cluster.whole", "Evaluation": "evaluation.scores",
    "InferencePlan": "generation.plan",
}  # fmt: skip


def register() -> None:
    """Records show themselves from now on."""
    SHOWN["FineTunePlan"] = partial(_shown, lambda plan: whole.document(plan, advised(plan)))
    for name, view in VIEWS.items():
        SHOWN[name] = partial(_shown, import_module(f"foretrain.reports.views.{view}").document)


def _shown(document: Callable[[Any], Document], record: Any, as_html: bool) -> str:
    found = document(record)
    screen = _screen(found, as_html)
    if not as_html:
        return screen
    pictures = [
        svg(block) for _, blocks in found.on("page") for block in blocks if isinstance(block, StackedBars | Curves)
    ]
    return "\n".join([screen, *filter(None, pictures)])


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
