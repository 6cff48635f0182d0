"""The exact answer of a fine-tuning form, in a process of its own (web/child.py): a trace of the Trainer's loop."""

from typing import Any

from foretrain.app import finetune
from foretrain.web import child
from foretrain.web.finetune import asked as ask
from foretrain.web.finetune import shown


def traced(asked: dict[str, Any]) -> dict[str, Any]:
    """The plan of a form with traced memory, as the page shows it; says how far the trace is. Raises UserError."""
    form = ask.Asked.model_validate(asked)
    question = ask.question(form)
    plan = ask.made(question, ask.target(form))
    return shown.plan_json(finetune.traced(plan, question, lambda text: child.say({"progress": text})), question)
