"""Advice for what stands in the form: a table, and for each row what to set so that the form becomes it."""

from typing import Annotated, Any

from pydantic import Field

from foretrain.advice.rules.base import Goal
from foretrain.app.advise import advices
from foretrain.base.errors import UserError
from foretrain.predict.spec import StepName
from foretrain.reports.html import document_json
from foretrain.reports.views import advice as advice_view
from foretrain.web import planner
from foretrain.web.answers import SCHEMA
from foretrain.web.ranks import shown

MOST = 8


class AskedAdvice(planner.Asked):
    """A form, what to look for (None: what it needs most), and whose step runs."""

    goal: Goal | None = None
    step: StepName = "foretrain"
    most: Annotated[int, Field(ge=1, le=50)] = MOST


def answer(asked: AskedAdvice) -> dict[str, Any]:
    """The best changes as one table, what to set for each, and what would not help. Raises UserError."""
    resolved = planner.resolved(asked)
    if planner.count(asked) > 1:
        if asked.step != "foretrain":
            raise UserError("page.count_nanogpt", count=planner.count(asked))
        return shown.answer(asked, resolved, asked.goal, asked.most)
    plan = planner.made(resolved, asked.gpu, asked.others).run_by(asked.step)
    found = advices(plan, asked.goal).top(asked.most)
    document = document_json(advice_view.document(plan, found))
    now, listed, *rest = document["sections"]
    changes = [
        {
            "text": advice_view.short(plan, advice), "gpu": advice.gpu if advice.gpu != found.gpu else None,
            "values": {setting.option: setting.after for setting in advice.settings}, "step": advice.step,
            "used_by_others_bytes": (
                advice.used_by_others_bytes if advice.used_by_others_bytes != found.used_by_others_bytes else None
            ),
            "count": None, "able": True,
        }
        for advice in found.advised
    ]  # fmt: skip
    return {"schema": SCHEMA, "now": now, "list": listed, "rest": rest, "changes": changes}
