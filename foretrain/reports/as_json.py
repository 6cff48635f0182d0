"""A Document as JSON with every text made: pictures as draw.js draws them, each beside its numbers."""

from typing import Any

from foretrain.base.messages import printable, say
from foretrain.reports.charts import chart
from foretrain.reports.document import Block, Document, Figure, Figures, Paragraph, Place, Table, Verbatim, cell_text
from foretrain.reports.numbers import behind
from foretrain.reports.palette import LINES_DARK, LINES_LIGHT


def document_json(document: Document, place: Place = "page") -> dict[str, Any]:
    """What one place shows of a document, with every text made."""
    return {
        "title": printable(document.title.text()), "subtitle": printable(document.subtitle.text()),
        "sections": [
            {"title": title.text(), "blocks": [block_json(block) for block in blocks]}
            for title, blocks in document.on(place)
        ],
    }  # fmt: skip


def block_json(block: Block) -> dict[str, Any]:
    """A block with its texts made; a picture as draw.js draws it, with its numbers as a table."""
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
            return {
                "kind": "chart", "title": printable(block.title.text()), "picture": _printable(chart(block)),
                "source": printable(block.source.text()) if block.source else "", "numbers": block_json(behind(block)),
            }  # fmt: skip


def _figure_json(figure: Figure) -> dict[str, str]:
    label, shown = figure.label, (figure.value, figure.range, figure.source)
    value, ends, source = (printable(cell_text(cell)) for cell in shown)
    id = label.id.rpartition(".")[2]
    return {"id": id, "label": label.text(), "value": value, "range": ends, "source": source}


def _printable(value: Any) -> Any:
    """The same with every text in it printable: a run's labels and settings may hold anything."""
    if isinstance(value, dict):
        return {key: _printable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def drawing() -> dict[str, Any]:
    """What pictures need besides themselves: colours of lines, and some words."""
    texts = {name: say(f"report.{name}") for name in ("by_keys", "over", "smoothing")}
    return {"light": LINES_LIGHT, "dark": LINES_DARK, "texts": texts}
