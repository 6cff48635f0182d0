"""What would end in a lower loss in the same time: the schedule, the recipe, more steps, another shape of the model."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foretrain.advice.best import best
from foretrain.advice.record import Advice, Advices, Estimate, Idle, with_settings
from foretrain.advice.rules import BY_ID
from foretrain.advice.rules.base import Goal, State
from foretrain.advice.search import Search
from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.predict.plan import Plan
from foretrain.predict.pretraining import adjusted, spent_by_steps
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.scaling import BESIROGLU
from foretrain.predict.within import most_steps

LEAST_GAIN = 0.002  # nats: less than any law can tell apart
BY_CERTAINTY = ("decay_to_end", "modern_recipe", "best_shape", "more_steps", "step_tokens")


def lower_losses(
    plan: Plan | ClusterPlan, search: Search, faster: Callable[[], Advices], goal: Goal | None, **known: Any
) -> Advices:
    """Return what would end in a lower loss within the run's time, and fits by the plan, by a scaling law or by what
    was measured or published; `faster`: the advice for speed."""
    found: list[Advice] = []
    useless: list[Idle] = []
    for id in ("decay_to_end", "modern_recipe", "step_tokens"):
        options = BY_ID[id].changes(search.state)
        made = search.made((id,), options[0], search.state) if options else None
        if made is not None and made.fits:
            found.append(search.advice(made))
        elif made is not None:
            useless.append(Idle(rule=id, reason="beyond", values={"needed": made.needed_bytes}))
        else:
            useless.append(Idle(rule=id, reason="already_on" if not options else "not_here"))
    one = plan if isinstance(plan, Plan) else plan.one_card
    estimable = _loss(one.config, one.work.dataset_tokens) < math.log(one.config.vocab_size)  # less than by guessing
    looks = {
        "more_steps": lambda: _more_steps(one, search, faster()),
        "best_shape": lambda: _best_shape(plan, one, search),
    }
    for id, look in looks.items():
        if not estimable:  # far outside of the runs that the law was fitted to
            useless.append(Idle(rule=id, reason="beyond_law"))
        elif (advice := look()) is not None:
            found.append(advice)
        else:
            useless.append(Idle(rule=id, reason="no_better"))
    found.sort(key=lambda each: BY_CERTAINTY.index(each.rules[-1]))
    return search.answer(plan, goal, found, useless=tuple(useless), **known)


def _loss(config: RunConfig, data: int | None) -> float:
    return BESIROGLU.loss(ModelShape.of(config).n_params, config.max_iters * config.tokens_per_step, data)


def _estimate(plan: Plan, then: RunConfig) -> Estimate | None:
    """Of two configs; None where the second is not estimably better."""
    data, now = plan.work.dataset_tokens, plan.config
    estimate = Estimate(
        loss_now=_loss(now, data), loss_then=_loss(then, data), law=BESIROGLU.source, steps_then=then.max_iters,
        tokens_now=now.max_iters * now.tokens_per_step, tokens_then=then.max_iters * then.tokens_per_step,
    )  # fmt: skip
    return estimate if estimate.loss_then < estimate.loss_now - LEAST_GAIN else None


def _budget(search: Search) -> Limit:
    total_s = search.base.total_s
    assert total_s is not None
    return Limit(kind="time", amount=total_s, text=f"{total_s / 3600:.3g}h")


def _with(search: Search, plan: Plan, rules: tuple[str, ...], config: RunConfig, state: State) -> Advice | None:
    estimate = _estimate(plan, config)
    outcome = search.planner.outcome(replace(state, config=config))
    if estimate is None or outcome is None or not outcome.fits:
        return None
    update = {"estimate": estimate, "price": round(estimate.loss_then - estimate.loss_now, 4)}
    return search.advice(search.of(rules, outcome)).model_copy(update=update)


def _more_steps(plan: Plan, search: Search, advices: Advices) -> Advice | None:
    """The best advice for speed, and the steps that its time is good for."""
    for faster in advices.advised:
        now, cards = search.state, faster.shared.cards if faster.shared else 1
        if faster.exactness not in ("exact", "rounding") or faster.gpu != plan.gpu.name or cards != now.world:
            continue
        config = with_settings(plan.config, faster.settings)
        others = faster.used_by_others_bytes
        then = replace(now, config=config, step=faster.trainer, used_by_others_bytes=others)
        if faster.shared:
            then = replace(then, ways=(faster.shared.way.id,))
        outcome = search.planner.outcome(then)
        if outcome is None or outcome.timing is None:
            continue
        budget = _budget(search)
        spent = spent_by_steps(outcome.timing, then.spec, budget, cards=cards)
        steps = most_steps(budget, then.config.tokens_per_step, spent)
        if steps <= config.max_iters:
            continue
        return _with(search, plan, (*faster.rules, "more_steps"), adjusted(config, steps)[0], then)
    return None


def _best_shape(plan: Plan | ClusterPlan, one: Plan, search: Search) -> Advice | None:
    if plan.config.init_from != "scratch" or plan.config.recipe != "nanogpt" or plan.available_bytes is None:
        return None
    try:
        winner = best(plan, _budget(search), search.state.step).candidates[0]
    except UserError:  # nothing of the grid fits
        return None
    if winner.timing.length_s.expected_s > 1.01 * (search.base.total_s or 0):
        return None
    sharing = {name: getattr(plan.config, name) for name in ("strategy", "hold_gradients")}  # the plan's is the state's
    config = winner.config.model_copy(update=sharing)
    return _with(search, one, ("best_shape",), config, search.state)
