"""What `print(record)` and a notebook show: the text of the command line, and in a notebook the report's pictures."""

import io
from collections.abc import Callable
from functools import partial
from html import escape
from importlib import import_module
from typing import Any

from foretrain.app.finetune import advised
from foretrain.base.records import SHOWN
from foretrain.reports import text
from foretrain.reports.charts import chart
from foretrain.reports.document import Curves, Document, StackedBars
from foretrain.reports.palette import LINES_LIGHT
from foretrain.reports.views.finetune import whole

PICTURE_WIDTH, BAR, GAP, LEFT, RIGHT = 720, 22, 12, 190, 80
HEIGHT, TOP, BOTTOM = 220, 10, 28  # of curves
TEXT = "#767676"  # four and a half to one against white, and against black
LEGEND_WIDTH = 180


def svg(picture: StackedBars | Curves) -> str:
    """An SVG element of a picture; "" of curves without values, or over logarithms."""
    draw = _stacked if isinstance(picture, StackedBars) else _curves
    return draw(chart(picture), picture.title.text())


def _element(height: float, title: str, parts: list[str]) -> str:
    style = "max-width:100%;height:auto;display:block;font:12px system-ui,sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} {height:g}" width="{PICTURE_WIDTH}" '
        f'role="img" aria-label="{escape(title, quote=True)}" style="{style}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{TEXT}" text-anchor="{anchor}">{escape(text)}</text>'


def _stacked(found: dict[str, Any], title: str) -> str:
    """Horizontal bars, one below the other, each with its sum; lines of limits; what the colours are."""
    most = max([found["most"], *(level["value"] for level in found["levels"])]) or 1
    scale = (PICTURE_WIDTH - LEFT - RIGHT) / most
    parts: list[str] = []
    for number, (label, end) in enumerate(zip(found["labels"], found["ends"], strict=True)):
        y, x = number * (BAR + GAP), float(LEFT)
        parts.append(_text(LEFT - 8, y + BAR - 6, label, "end"))
        for group in found["groups"]:
            width = group["values"][number] * scale
            if width:
                said = escape(f"{group['label']}: {group['said'][number]}")
                place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
                parts.append(f'<rect {place} fill="{group["colour"]}"{_faint(group)}><title>{said}</title></rect>')
                x += width
        parts.append(_text(x + 6, y + BAR - 6, end))
    bottom = len(found["labels"]) * (BAR + GAP)
    for level in found["levels"]:
        at = LEFT + level["value"] * scale
        parts.append(f'<path d="M{at:.1f} 0V{bottom}" stroke="{TEXT}" stroke-dasharray="4 3"/>')
        parts.append(_text(at, bottom + 14, level["label"], "end"))
    bottom += 20 if found["levels"] else 0
    across = PICTURE_WIDTH // LEGEND_WIDTH
    for number, group in enumerate(found["groups"]):
        x, y = number % across * LEGEND_WIDTH, bottom + number // across * 20
        parts.append(f'<rect x="{x}" y="{y + 3}" width="11" height="11" fill="{group["colour"]}"{_faint(group)}/>')
        parts.append(_text(x + 17, y + 13, group["label"]))
    return _element(bottom + -(-len(found["groups"]) // across) * 20 + 4, title, parts)


def _faint(group: dict[str, Any]) -> str:
    return ' fill-opacity=".5"' if group["hatched"] else ""


def _curves(found: dict[str, Any], title: str) -> str:
    """Lines over the first axis, with the least and the most of either axis."""
    traces = [trace for trace in found["traces"] if trace["values"]]
    places = [x for trace in traces for x in trace["places"][0]]
    values = [y for trace in traces for y in trace["values"] if y is not None]
    if not places or not values:
        return ""
    if found["axes"][0]["log"] or found["y"]["log"]:
        return ""
    (left, right), (low, high) = (min(places), max(places)), (min(values), max(values))
    low = 0 if found["y"]["zero"] else low
    across = (PICTURE_WIDTH - LEFT // 2 - RIGHT) / (right - left or 1)
    down = (HEIGHT - TOP - BOTTOM) / (high - low or 1)
    parts: list[str] = []
    for x, tick in next(iter(found["axes"][0]["ticks"]), []):
        if left <= x <= right:
            parts.append(_text(LEFT // 2 + (x - left) * across, HEIGHT - 8, tick, "middle"))
    for y, tick in next(iter(found["y"]["ticks"]), []):
        if low <= y <= high:
            at = HEIGHT - BOTTOM - (y - low) * down
            parts.append(
                f'<path d="M{LEFT // 2} {at:.1f}H{PICTURE_WIDTH - RIGHT}" stroke="{TEXT}" stroke-opacity=".25"/>'
            )
            parts.append(_text(LEFT // 2 - 6, at + 4, tick, "end"))
    for number, trace in enumerate(traces):
        colour = LINES_LIGHT[trace["colour"] % len(LINES_LIGHT)]
        line = " ".join(
            f"{LEFT // 2 + (x - left) * across:.1f},{HEIGHT - BOTTOM - (y - low) * down:.1f}"
            for x, y in zip(trace["places"][0], trace["values"], strict=True)
            if y is not None
        )
        dash = ' stroke-dasharray="5 4"' if trace["dashed"] else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        parts.append(f'<rect x="0" y="{HEIGHT + number * 18 + 2}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(17, HEIGHT + number * 18 + 12, trace["label"]))
    return _element(HEIGHT + len(traces) * 18 + 6, title, parts)


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
    of = {name: import_module(f"foretrain.reports.views.{view}").document for name, view in VIEWS.items()}
    of["FineTunePlan"] = lambda plan: whole.document(plan, advised(plan))
    SHOWN.update({name: partial(_shown, document) for name, document in of.items()})  # at once: threads may ask


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
