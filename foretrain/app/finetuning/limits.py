"""Money and limits of a fine-tuning run: the rent of each card, what fits in a limit, several cards side by side."""

from collections.abc import Sequence
from dataclasses import replace

from foretrain.advice.cards import FineTuneCards, compared
from foretrain.app.finetune import plan_question
from foretrain.app.finetuning.question import FineTuneQuestion, costs_in
from foretrain.app.limits import Limits, priced, prices_of
from foretrain.app.plan import check_speed, targets
from foretrain.hardware.devices import Target
from foretrain.predict.energy import Prices
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.finetuning import of_plan
from foretrain.predict.within import Within
from foretrain.predict.within import within as within_limit


def plans(
    asked: FineTuneQuestion,
    gpus: str,
    others: str,
    limits: Limits,
    step_s: float | None = None,
) -> list[FineTunePlan]:
    """Return a plan for each card, with its own rent where one is given for it. `gpus`: names parted by commas. Raises
    UserError."""
    check_speed("--step-time", step_s)
    resolved = priced(costs_in(asked.costs), limits)
    found = targets(gpus, others, resolved.config)
    rents = prices_of(limits, resolved.config, [target.gpu for target in found])
    prices = Prices.of(resolved.config)

    def planned(target: Target, rent: float) -> FineTunePlan:
        own = replace(asked, prices=prices.model_copy(update={"price_per_hour": rent}))
        return plan_question(own, target.gpu, target.used_by_others_bytes, step_s)

    return [planned(target, rent) for target, rent in zip(found, rents, strict=True)]


def within(plan: FineTunePlan, limits: Limits) -> Within:
    """What --within or --tokens ask of a plan. Raises UserError where not one step fits, or nobody can say."""
    return within_limit(of_plan(plan), limits.limit())


def limited(plan: FineTunePlan, text: str) -> FineTunePlan:
    """The plan with as many steps as fit in a limit such as "12h". Raises UserError as `within` does."""
    found = within(plan, Limits(within=text)).plan
    assert isinstance(found, FineTunePlan)
    return found


def cards(found: Sequence[FineTunePlan], limits: Limits) -> FineTuneCards:
    """Several cards beside each other: the run as it is, or what fits in a limit."""
    return compared(found, limits.limit() if limits.asks else None)
