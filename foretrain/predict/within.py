"""The inverse question: how many steps of a run fit in hours, kilowatt-hours, money or tokens, found by halving."""

from collections.abc import Callable

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit, currency_code
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import Forecast
from foretrain.predict.plan import Plan, Reading, no_time
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.search import bisect
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import Spending

MOST_STEPS = 10**10  # as many as an option allows
# What one step takes: of pretraining with all that a run has besides.
TOO_SMALL = {"time": "check.within_time", "energy": "check.within_energy", "money": "check.within_money"}
TOO_SMALL_FINE_TUNING = {
    "time": "check.finetune_within_time", "energy": "check.finetune_within_energy",
    "money": "check.finetune_within_money",
}  # fmt: skip


class Within(Record):
    """What fits in a limit, also by the forecast's high (`steps_cautious`) and low end. `tokens`: of `steps` full
    steps; `changed`: options that follow them; `asked_steps`: before, where known."""

    limit: Limit
    steps: int
    steps_cautious: int
    steps_optimistic: int
    tokens: int
    epochs: float | None
    asked_steps: int | None
    changed: tuple[str, ...]
    plan: Plan | ClusterPlan | FineTunePlan


def spent_of(total: Range, timing: Spending, limit: Limit, reading: Reading) -> float:
    """Return how much of the limit's kind a run takes. Raises UserError where that is not known."""
    if limit.kind == "time":
        return getattr(total, f"{reading}_s")
    if limit.kind == "energy":
        energy = getattr(timing, f"energy_{reading}_j")
        if energy is None:
            raise UserError("usage.no_power", text=limit.as_option)
        return energy
    money = timing.money()
    if money is None or money[1] == 0:
        raise UserError("usage.no_price", text=limit.as_option)
    return money[("low", "expected", "high").index(reading)]


def most_steps(limit: Limit, tokens_per_step: int, spent: Callable[[int], float]) -> int:
    """Return the largest number of steps that stays within the limit, 0 where not even one does."""
    if limit.kind == "tokens":
        return min(MOST_STEPS, int(limit.amount) // tokens_per_step)
    return bisect(lambda steps: spent(steps) <= limit.amount, 0, MOST_STEPS + 1)


def check_currency(limit: Limit, currency: str) -> None:
    """Raise UserError for a limit in another currency than the prices."""
    if limit.kind == "money" and limit.currency and limit.currency != currency_code(currency):
        raise UserError("usage.currency", text=limit.as_option, typed=limit.currency, currency=currency)


def within(found: Forecast, limit: Limit) -> Within:
    """Return the steps of a run that fit in a limit. Raises UserError 'check.…' where not one does."""
    run = found.run
    run.check(found, limit.as_option, steps=True)
    if found.timing is None:
        raise no_time(found.plan, limit.as_option)
    check_currency(limit, run.prices.currency)
    expected, cautious, optimistic = (
        most_steps(limit, run.tokens_per_step, run.spent(found, limit, reading))
        for reading in ("expected", "high", "low")
    )
    if not expected:
        raise _too_small(found, limit)
    if expected >= MOST_STEPS:
        raise UserError("usage.limit_too_large", text=limit.as_option, most=MOST_STEPS)
    plan, changed = run.with_steps(found, expected)
    tokens = expected * run.tokens_per_step
    return Within(
        limit=limit, steps=expected, steps_cautious=cautious, steps_optimistic=min(optimistic, MOST_STEPS),
        tokens=tokens, epochs=tokens / run.dataset_tokens if run.dataset_tokens else None, asked_steps=run.steps,
        changed=changed, plan=plan,
    )  # fmt: skip


def _too_small(found: Forecast, limit: Limit) -> UserError:
    run = found.run
    if limit.kind == "tokens":
        return UserError("check.within_tokens", text=limit.as_option, needs=run.tokens_per_step)
    needs = run.spent(found, limit, "expected")(1)
    money = {"currency": run.prices.currency} if limit.kind == "money" else {}
    ids = TOO_SMALL_FINE_TUNING if run.kind == "fine-tuning" else TOO_SMALL
    return UserError(ids[limit.kind], text=limit.as_option, needs=needs, **money)
