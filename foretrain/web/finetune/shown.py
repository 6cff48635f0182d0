"""A fine-tuning plan as the page shows it, with every text made: the terminal's screen and document, and a picture."""

from typing import Any

from foretrain.advice.record import Advice
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.base.messages import printable
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.reports.document import cell_text
from foretrain.reports.html import block_json, document_json
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views.finetune import screen as screen_view
from foretrain.reports.views.finetune import whole as whole_view
from foretrain.reports.views.shared import TONES
from foretrain.web import answers


def plan_json(plan: FineTunePlan, question: FineTuneQuestion) -> dict[str, Any]:
    """Verdict, key figures, the lines of the terminal's first screen, the memory of every phase, then the rest of the
    document. Options are shown as they were asked, `auto` among them."""
    document = document_json(whole_view.document(plan, ()), "terminal")  # the picture stands above
    verdict, *rest = document["sections"]
    rows = [[row.label.text(), printable(cell_text(row.text))] for row in whole_view.lines(plan)]
    return {
        "schema": answers.SCHEMA, "title": document["title"], "subtitle": document["subtitle"],
        "model": printable(whole_view.sizes(plan).text()), "verdict": verdict["blocks"],
        "figures": block_json(plan_view.of_finetune(plan))["items"], "rows": rows,
        "pictures": [block_json(whole_view.bars(plan))],
        "strip": answers.strip([(whole_view.name(plan), plan.memory, plan.verdict)], plan.available_bytes),
        "sections": rest, "changes": plan.verdict != "fits",
        "config": {**question.tune.model_dump(mode="json"), **question.prices.model_dump(mode="json")},
    }  # fmt: skip


def change_json(change: Advice) -> dict[str, Any]:
    """A change as the terminal says it, and what to set for it."""
    return {
        "text": printable(screen_view.change_text(change)), "values": change.options,
        "tone": TONES[change.effect.verdict],
    }  # fmt: skip
