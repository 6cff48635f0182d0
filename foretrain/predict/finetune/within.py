"""The inverse question: how much fine-tuning fits in hours, kilowatt-hours, money or tokens. No torch."""

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan, check_exact
from foretrain.predict.finetune.timing import FineTuneTiming, with_steps
from foretrain.predict.within import MOST_STEPS, Reading, check_currency, largest_count, spent_of

TOO_SMALL = {
    "time": "check.finetune_within_time", "energy": "check.finetune_within_energy",
    "money": "check.finetune_within_money",
}  # fmt: skip


class FineTuneWithin(Record):
    """What fits in a limit. `steps_cautious` counts with the high end of the forecast, `steps_optimistic` with the low
    end. `tokens`: of `steps` full steps; `epochs`: as passes over the data, None where its tokens are not known.

    `plan` is the plan that was asked about with as many steps as fit; `asked_steps`: as it was, where that is known.
    """

    limit: Limit
    steps: int
    steps_cautious: int
    steps_optimistic: int
    tokens: int
    epochs: float | None
    asked_steps: int | None
    plan: FineTunePlan


def within(plan: FineTunePlan, limit: Limit) -> FineTuneWithin:
    """The steps that fit in a limit. Raises UserError 'check.…' where not one does, and where nobody can say."""
    timing, tune = plan.timing, plan.tune
    check_exact(plan, limit.as_option)
    if timing is None:
        raise UserError("usage.no_time", text=limit.as_option, gpu=plan.gpu.name)
    check_currency(limit, timing.prices.currency)
    expected, cautious, optimistic = (
        _most_steps(plan, timing, limit, reading) for reading in ("expected", "high", "low")
    )
    if not expected:
        raise _too_small(plan, timing, limit)
    if expected >= MOST_STEPS:
        raise UserError("usage.limit_too_large", text=limit.as_option, most=MOST_STEPS)
    tokens = expected * tune.tokens_per_step
    fitting = tune.model_copy(update={"max_steps": expected})
    changed = {"tune": fitting, "timing": with_steps(timing, plan.gpu, expected)}
    return FineTuneWithin(
        limit=limit, steps=expected, steps_cautious=cautious, steps_optimistic=min(optimistic, MOST_STEPS),
        tokens=tokens, epochs=tokens / tune.dataset_tokens if tune.dataset_tokens else None, asked_steps=tune.steps,
        plan=plan.model_copy(update=changed),
    )  # fmt: skip


def _most_steps(plan: FineTunePlan, timing: FineTuneTiming, limit: Limit, reading: Reading) -> int:
    if limit.kind == "tokens":
        return min(MOST_STEPS, int(limit.amount) // plan.tune.tokens_per_step)
    return largest_count(lambda steps: _amount(plan, timing, limit, reading, steps) <= limit.amount, MOST_STEPS)


def _amount(plan: FineTunePlan, timing: FineTuneTiming, limit: Limit, reading: Reading, steps: int) -> float:
    """How much of the limit's kind so many steps take."""
    found = with_steps(timing, plan.gpu, steps)
    return spent_of(found.total_s or found.step_s, found, limit, reading)


def _too_small(plan: FineTunePlan, timing: FineTuneTiming, limit: Limit) -> UserError:
    """What one step would take."""
    if limit.kind == "tokens":
        return UserError("check.within_tokens", text=limit.as_option, needs=plan.tune.tokens_per_step)
    return UserError(
        TOO_SMALL[limit.kind], text=limit.as_option, currency=timing.prices.currency,
        needs=_amount(plan, timing, limit, "expected", 1),
    )  # fmt: skip
