"""A run on several cards as the page shows it: the strategies side by side, and whether the cards pay."""

from typing import Any

from foretrain.advice.asked import Asked as Typed
from foretrain.advice.cluster import options_of
from foretrain.advice.record import Advice
from foretrain.advice.rules.base import Goal
from foretrain.app.ranks.plan import advices, make_cluster_plan
from foretrain.base.messages import printable
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.cluster import cluster
from foretrain.predict.ranks import ClusterPlan
from foretrain.reports.document import cell_text
from foretrain.reports.html import block_json, document_json
from foretrain.reports.views.cluster import advice as view
from foretrain.reports.views.cluster import screen as screen_view
from foretrain.reports.views.cluster import whole as whole_view
from foretrain.web import answers, devices, planner


def made(asked: planner.Asked, found: ResolvedConfig) -> ClusterPlan:
    """The plan of a config on as many cards as the form says: what `plan --gpus` answers. Raises UserError."""
    target = devices.target(asked.gpu, asked.others, found.config)
    cards = cluster(str(planner.count(asked)), here=lambda: target.gpu)
    return make_cluster_plan(found, cards, target.used_by_others_bytes)


def plan_json(asked: planner.Asked, found: ResolvedConfig) -> dict[str, Any]:
    """Verdict, a table with a row for each strategy, the lines of the terminal's first screen, then the rest of the
    document. Raises UserError."""
    plan = made(asked, found)
    document = document_json(whole_view.document(plan), "terminal")
    screen = screen_view.screen(plan, Typed(quiet=True))
    ranks = [(screen_view.strategy(rank), rank.memory, rank.verdict) for rank in screen_view.shown(plan)]
    return {
        "schema": answers.SCHEMA, "title": document["title"], "subtitle": document["subtitle"],
        "verdict": document["sections"][0]["blocks"][:1], "figures": [], "pictures": [],
        "table": block_json(screen.table) if screen.table else None,
        "rows": [[row.label.text(), printable(cell_text(row.text))] for row in screen.rows],
        "strip": answers.strip(ranks, plan.one_card.available_bytes), "sections": document["sections"][1:],
        "exact": False, "config": plan.config.model_dump(mode="json"), "sources": found.sources,
        "notes": [printable(str(note)) for note in found.notes],
    }  # fmt: skip


def answer(asked: planner.Asked, found: ResolvedConfig, goal: Goal | None, most: int) -> dict[str, Any]:
    """The best changes as one table, what other numbers of cards give, and what would not help. Raises UserError."""
    plan = made(asked, found)
    advice = advices(plan, goal).top(most)
    now, counts, listed, *rest = document_json(view.document(plan, advice))["sections"]
    changes = [{"text": view.short(plan, advice, each), **_to_set(plan, each)} for each in advice.advised]
    return {"schema": answers.SCHEMA, "now": now, "list": listed, "rest": [counts, *rest], "changes": changes}


def _to_set(plan: ClusterPlan, change: Advice) -> dict[str, Any]:
    """What the form has to have. `able`: False for what no field of it is for, such as another link."""
    values = options_of(plan, change)
    count = change.shared.cards if change.shared else plan.cluster.world
    cards = None if count == plan.cluster.world else str(count)
    return {
        "gpu": None, "used_by_others_bytes": None, "step": "foretrain", "values": values, "count": cards,
        "able": bool(values or cards),
    }  # fmt: skip
