"""What the command line says beside a plan, kept on disk as plans.py has it."""

from collections.abc import Callable
from typing import Any

from foretrain.advice.advisor import short_list as shortened
from foretrain.advice.asked import Asked
from foretrain.advice.best import Best
from foretrain.advice.first_answer import FirstAnswer, first_answer
from foretrain.advice.record import Advices
from foretrain.app import advise, limits
from foretrain.app.kept import plans
from foretrain.base.records import Record
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan


class ShortList(Record):
    """What a plan's screen shows of advice; None where nothing pays."""

    found: Advices | None


def _of(plan: Plan | ClusterPlan) -> dict[str, Any]:
    return {"plan": plan.model_dump(mode="json")}


def first(plan: Plan, asked: Asked) -> FirstAnswer:
    """The same as `advice.first_answer`."""
    question = {**_of(plan), "asked": asked.model_dump(mode="json")}
    return plans.answer("first", question, plan.gpu, plan.config, FirstAnswer, lambda: first_answer(plan, asked))


def short_list(plan: Plan) -> Advices | None:
    """The same as `advice.advisor.short_list`, of the step that is meant."""

    def make() -> ShortList:
        return ShortList(found=shortened(plan, plan.step))

    return plans.answer("short", _of(plan), plan.gpu, plan.config, ShortList, make).found


def base_plan(resolved: ResolvedConfig, gpu: str, used_by_others: str, price: str | None) -> Plan:
    """The same as `app.advise.base_plan`. Raises UserError as it does."""
    return advise.base_plan(resolved, gpu, used_by_others, price, by=plans.plan)


def advices(base: Plan, goal: str | None, price: str | None) -> Advices:
    """The same as `app.advise.advices`. Raises UserError as it does."""

    def make() -> Advices:
        return advise.advices(base, goal, price)  # type: ignore[arg-type]

    question = {**_of(base), "goal": goal, "price": price}
    return plans.answer("advices", question, base.gpu, base.config, Advices, make)


def best(plan: Plan | ClusterPlan, asked: limits.Limits, listen: Callable[[int, int], None]) -> Best:
    """The same as `app.limits.best_of`, of the step that is meant. Raises UserError as it does."""

    def make() -> Best:
        return limits.best_of(plan, asked, listen)

    question = {**_of(plan), "limit": asked.limit().model_dump(mode="json"), "given": sorted(asked.given)}
    return plans.answer("best", question, plan.gpu, plan.config, Best, make)
