"""The exact answer for the page, made in a process of its own (child.py): a plan comes in, the deeper plan goes out."""

from collections.abc import Callable
from typing import Any

from foretrain.app import finetune
from foretrain.app.exact import traced_plan
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import Plan
from foretrain.web.finetune import asked as ask
from foretrain.web.finetune import shown


def traced(asked: dict[str, Any], listen: Callable[[str], None]) -> dict[str, Any]:
    """A plan's JSON with traced memory; `listen` hears how far the traces are. Raises UserError."""
    plan = Plan.model_validate(asked)
    plan = plan.model_copy(update={"gpu": Gpu.model_validate(asked["gpu"])})
    return traced_plan(plan, listen).to_json()


def traced_finetune(asked: dict[str, Any], listen: Callable[[str], None]) -> dict[str, Any]:
    """The plan of a form with traced memory, as the page shows it; `listen` hears how far. Raises UserError."""
    form = ask.Asked.model_validate(asked)
    question = ask.question(form)
    plan = ask.made(question, ask.target(form))
    return shown.plan_json(finetune.traced(plan, question, listen), question)
