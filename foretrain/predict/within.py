"""The inverse question: how many steps fit in hours, kilowatt-hours, money or tokens.

The answer is the largest max_iters whose whole run, as `plan` counts it (steps, compilation, every evaluation and
checkpoint), stays within the limit. It is searched by halving, since each of these only grows with the steps.
"""

from collections.abc import Callable

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit, currency_code
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.predict.energy import Spending
from foretrain.predict.memory import Verdict
from foretrain.predict.plan import READINGS, Plan, Reading, Timing, no_time, seconds_by_steps, whole_run
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.time import Range


def largest_count(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` that fits, found by doubling and then by halving; 0 where not even 1 does.

    `fits` must say no to every count above one that does not fit.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


MOST_STEPS = 10**10  # as many as the knob allows
MOST_WARMUP = 1 / 20  # of a run


class Within(Record):
    """What fits in a limit. `cautious` counts with the high end of the forecast, `optimistic` with the low end.

    `config` is the one that was asked about with the steps that fit, and what has to follow them; `changed` names
    the knobs that differ.
    """

    limit: Limit
    step: StepName
    steps: int
    steps_cautious: int
    steps_optimistic: int
    tokens: int
    epochs: float | None
    timing: Timing
    asked_max_iters: int
    config: RunConfig
    changed: tuple[str, ...]
    verdict: Verdict | None


def with_steps(timing: Timing, spec: StepSpec, steps: int) -> Timing:
    """The timing of the same run with another number of steps: what `plan` says of that config."""
    t = timing
    return whole_run(spec.but(max_iters=steps), t.source, t.step_s, t.evaluation_s, t.compile_s)


def amount_of(timing: Timing, limit: Limit, reading: Reading) -> float:
    """How much of the limit's kind a run takes, in the limit's unit. Raises UserError where that is not known."""
    return spent_of(timing.total_s, timing, limit, reading)


def spent_of(total: Range, timing: Spending, limit: Limit, reading: Reading) -> float:
    """The same of any run that takes so long and spends so much."""
    place = READINGS.index(reading)
    if limit.kind == "time":
        return (total.low_s, total.expected_s, total.high_s)[place]
    if limit.kind == "energy":
        energy = (timing.energy_low_j, timing.energy_expected_j, timing.energy_high_j)[place]
        if energy is None:
            raise UserError("usage.no_power", text=limit.as_option)
        return energy
    money = timing.money()
    if money is None or money[1] == 0:
        raise UserError("usage.no_price", text=limit.as_option)
    return money[place]


def largest_steps(timing: Timing, spec: StepSpec, limit: Limit, reading: Reading = "expected") -> int:
    """The largest max_iters that stays within the limit; 0 where not even one step does."""
    if limit.kind == "tokens":
        return min(MOST_STEPS, int(limit.amount) // spec.config.tokens_per_step)

    if limit.kind == "time":
        seconds = seconds_by_steps(timing, spec, reading)
        return largest_count(lambda steps: seconds(steps) <= limit.amount, MOST_STEPS)

    def fits(steps: int) -> bool:
        return amount_of(with_steps(timing, spec, steps), limit, reading) <= limit.amount

    return largest_count(fits, MOST_STEPS)


def _warmup_share(config: RunConfig) -> float:
    """The most of a run that its warm-up may be: a twentieth, or what it was."""
    asked = config.warmup_iters / config.max_iters
    return max(MOST_WARMUP, asked) if asked < 1 else MOST_WARMUP


def adjusted(config: RunConfig, steps: int) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with this many steps, and the knobs that changed.

    With `decay_lr` the learning rate's decay ends where the run ends, as nanoGPT's files have it. The warm-up stays,
    unless it would be more than a twentieth of the run and more than its share of the run that was asked for.
    """
    update = {"max_iters": steps}
    if config.decay_lr:
        update["lr_decay_iters"] = steps
        update["warmup_iters"] = min(config.warmup_iters, int(_warmup_share(config) * steps))
    changed = tuple(name for name, value in update.items() if getattr(config, name) != value)
    return config.model_copy(update=update), changed


def check_currency(limit: Limit, currency: str) -> None:
    """A limit in another currency than the prices cannot be compared with them."""
    if limit.kind == "money" and limit.currency and limit.currency != currency_code(currency):
        raise UserError("usage.currency", text=limit.as_option, typed=limit.currency, currency=currency)


def within(plan: Plan, limit: Limit, step: StepName = "foretrain") -> Within:
    """The steps of a plan's config that fit in a limit. Raises UserError 'check.within_…' where not one does."""
    config, spec = plan.config, plan.spec(step)
    timing = plan.timing_of(step)
    if config.eval_only:
        raise UserError("usage.eval_only", text=limit.as_option)
    if timing is None:
        raise no_time(plan, limit.as_option)
    check_currency(limit, config.currency)
    expected, cautious, optimistic = (
        largest_steps(timing, spec, limit, reading) for reading in ("expected", "high", "low")
    )
    if not expected:
        raise _too_small(with_steps(timing, spec, 1), config, limit)
    if expected >= MOST_STEPS:
        raise UserError("usage.limit_too_large", text=limit.as_option, most=MOST_STEPS)
    fitting, changed = adjusted(config, expected)
    tokens = expected * config.tokens_per_step
    return Within(
        limit=limit, step=step, steps=expected, steps_cautious=cautious, steps_optimistic=min(optimistic, MOST_STEPS),
        tokens=tokens, epochs=tokens / plan.work.dataset_tokens if plan.work.dataset_tokens else None,
        timing=with_steps(timing, spec, expected), asked_max_iters=config.max_iters, config=fitting,
        changed=changed, verdict=plan.verdict_of(step),
    )  # fmt: skip


def _too_small(one: Timing, config: RunConfig, limit: Limit) -> UserError:
    if limit.kind == "tokens":
        return UserError("check.within_tokens", text=limit.as_option, needs=config.tokens_per_step)
    needs = amount_of(one, limit, "expected")
    if limit.kind == "money":
        return UserError("check.within_money", text=limit.as_option, needs=needs, currency=config.currency)
    return UserError(
        "check.within_time" if limit.kind == "time" else "check.within_energy", text=limit.as_option, needs=needs
    )
