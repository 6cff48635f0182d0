"""A run on several cards as the page shows it: the strategies side by side, and whether the cards pay."""

from typing import Any

from foretrain.advice.asked import Asked as Typed
from foretrain.base.messages import printable
from foretrain.config.resolve import ResolvedConfig
from foretrain.reports.as_json import block_json, document_json
from foretrain.reports.document import cell_text
from foretrain.reports.views.cluster import screen as screen_view
from foretrain.reports.views.cluster import whole as whole_view
from foretrain.reports.views.cluster import words
from foretrain.web import answers, planner
from foretrain.web.ranks.planned import made


def plan_json(asked: planner.Asked, found: ResolvedConfig) -> dict[str, Any]:
    """Verdict, a table with a row for each strategy, the lines of the terminal's first screen, then the rest of the
    document. Raises UserError."""
    plan = made(asked, found)
    document = document_json(whole_view.document(plan), "terminal")
    screen = screen_view.screen(plan, Typed(quiet=True))
    ranks = [(words.strategy(rank), rank.memory, rank.verdict) for rank in screen_view.shown(plan)]
    return {
        "schema": answers.SCHEMA, "title": document["title"], "subtitle": document["subtitle"],
        "verdict": document["sections"][0]["blocks"][:1], "figures": [], "pictures": [],
        "table": block_json(screen.table) if screen.table else None,
        "rows": [[row.label.text(), printable(cell_text(row.text))] for row in screen.rows],
        "strip": answers.strip(ranks, plan.one_card.available_bytes), "sections": document["sections"][1:],
        "exact": False, "config": plan.config.model_dump(mode="json"), "sources": found.sources,
        "notes": [printable(str(note)) for note in found.notes],
    }  # fmt: skip
