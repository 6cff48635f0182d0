"""What to change in a fine-tuning run, each change planned. `foretrain.advise_finetune` for Python."""

from collections.abc import Callable
from typing import Any, get_args

from foretrain.advice.finetune_advice import AdvisedChange, FineTuneAdvice, FineTuneGoal, TracedChange
from foretrain.advice.finetune_advice import advise as advise_plan
from foretrain.app.finetune import plan_question, traced
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.app.planning import Source, asked_of
from foretrain.base.errors import UserError
from foretrain.predict.finetune.plan import FineTunePlan, check_exact, replanned

Listen = Callable[[str], None]


def advise_finetune(
    source: Source,
    gpu: str = "auto",
    *,
    used_by_others: str | int = "",
    goal: FineTuneGoal | None = None,
    exact: int = 0,
    listen: Listen = lambda state: None,
    **options: Any,
) -> FineTuneAdvice:
    """What to change in a fine-tuning run, best first: `foretrain.advise_finetune("qwen3-8b", "4070", method="lora")`.

    `source`, `options`: as in `plan_finetune`. `used_by_others`: memory that other programs use on the card, in bytes
    or as a text such as "2GB". `goal`: "fit" or "speed"; None: speed where the run fits, else fit. `exact`: how many of
    the changes are traced with the real Trainer's loop (seconds each, needs the extra hf), of which `listen` hears.
    Bytes and seconds, as the names say; `longer` is a share of the time of a token.
    Raises UserError for what cannot be planned.
    """
    asked = asked_of(source, options)
    found = advice(plan_question(asked, gpu, used_by_others), goal)
    return confirmed(found, asked, exact, listen)


def advice(plan: FineTunePlan, goal: str | None) -> FineTuneAdvice:
    """The changes to a plan. Raises UserError for a goal that is not searched for."""
    check_exact(plan, "foretrain advise")
    if goal and goal not in get_args(FineTuneGoal):
        raise UserError("usage.finetune_goal", goal=goal[:80], choices=get_args(FineTuneGoal))
    return advise_plan(plan, goal or None)  # type: ignore[arg-type]


def confirmed(found: FineTuneAdvice, asked: FineTuneQuestion, count: int, listen: Listen) -> FineTuneAdvice:
    """With what traces say of the first `count` changes."""
    checked = [_traced(found.plan, change, asked, listen) for change in found.advised[:count]]
    return found.model_copy(update={"advised": (*checked, *found.advised[count:])})


def _traced(plan: FineTunePlan, change: AdvisedChange, asked: FineTuneQuestion, listen: Listen) -> AdvisedChange:
    try:
        other = traced(replanned(plan, **change.changed), asked, listen)
        said = TracedChange(verdict=other.verdict, needed_bytes=other.needed_bytes)
    except UserError as error:
        said = TracedChange(reason=str(error))
    return change.model_copy(update={"traced": said})
