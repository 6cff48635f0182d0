"""Advice for several cards as the page shows it: for each change what to set, so that the form becomes it."""

from typing import Any

from foretrain.advice.ranks import applied
from foretrain.advice.ranks.record import ClusterChange
from foretrain.advice.rules.base import Goal
from foretrain.app.ranks.advise import advices
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.ranks.record import ClusterPlan
from foretrain.reports.as_json import document_json
from foretrain.reports.views.cluster import advice as view
from foretrain.web import answers, planner
from foretrain.web.ranks import planned


def answer(asked: planner.Asked, found: ResolvedConfig, goal: Goal | None, most: int) -> dict[str, Any]:
    """The best changes as one table, what other numbers of cards give, and what would not help. Raises UserError."""
    plan = planned.made(asked, found)
    advice = advices(plan, goal).top(most)
    now, counts, listed, *rest = document_json(view.document(plan, advice))["sections"]
    changes = [{"text": view.short(plan, advice, each), **_to_set(plan, each)} for each in advice.advised]
    return {"schema": answers.SCHEMA, "now": now, "list": listed, "rest": [counts, *rest], "changes": changes}


def _to_set(plan: ClusterPlan, change: ClusterChange) -> dict[str, Any]:
    """What the form has to have. `able`: False for what no field of it is for, such as another link."""
    values = applied.options(plan, change)
    cards = None if change.cards == plan.cluster.world else str(change.cards)
    return {
        "gpu": None, "used_by_others_bytes": None, "step": "foretrain", "values": values, "count": cards,
        "able": bool(values or cards),
    }  # fmt: skip
