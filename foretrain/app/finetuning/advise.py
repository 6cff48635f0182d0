"""What to change in a fine-tuning run, each change planned. `foretrain.advise_finetune` for Python."""

from collections.abc import Callable
from typing import Any

from foretrain.advice import confirm
from foretrain.advice.advisor import advise
from foretrain.advice.record import Advice, Advices, Confirmation
from foretrain.advice.rules.base import Goal
from foretrain.app.finetune import plan_question, traced
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.app.planning import Source, asked_of
from foretrain.base.errors import UserError
from foretrain.predict.finetune.plan import FineTunePlan, replanned

Listen = Callable[[str], None]


def advise_finetune(
    source: Source,
    gpu: str = "auto",
    *,
    used_by_others: str | int = "",
    goal: Goal | None = None,
    exact: int = 0,
    listen: Listen = lambda state: None,
    **options: Any,
) -> Advices:
    """What to change in a fine-tuning run, best first: `foretrain.advise_finetune("qwen3-8b", "4070", method="lora")`.

    `source`, `options`: as in `plan_finetune`. `used_by_others`: memory that other programs use on the card, in bytes
    or as a text such as "2GB". `goal`: "fit", "speed" or "cost"; None: speed where the run fits, else fit. `exact`: how
    many of the changes are traced with the real Trainer's loop (seconds each, needs the extra hf), of which `listen`
    hears.
    Bytes and seconds, as the names say; `effect.slower` is a share of the time of a token.
    Raises UserError for what cannot be planned.
    """
    asked = asked_of(source, options)
    plan = plan_question(asked, gpu, used_by_others)
    return confirmed(advise(plan, goal=goal), plan, asked, exact, listen)


def confirmed(found: Advices, plan: FineTunePlan, asked: FineTuneQuestion, count: int, listen: Listen) -> Advices:
    listed = "advised" if found.advised else "partial"
    checked = confirm.traced(getattr(found, listed), count, lambda change: _confirmation(plan, change, asked, listen))
    return found.model_copy(update={listed: checked})


def _confirmation(plan: FineTunePlan, change: Advice, asked: FineTuneQuestion, listen: Listen) -> Confirmation:
    try:
        other = traced(replanned(plan, **change.options), asked, listen)
    except UserError as error:
        return Confirmation(reason=str(error))
    saved, holds = plan.needed_bytes - other.needed_bytes, other.verdict == "fits"
    return Confirmation(verdict=other.verdict, needed_bytes=other.needed_bytes, saved_bytes=saved, holds=holds)
