"""Answers of the planner that are kept on disk, so that the command line gives them at once when they are asked again.

An answer is kept under a hash of all that decides it: what was asked, the torch that it is for, the user's own cards,
and all code that it comes from. So the answer of another version is never read. What a CPU does depends on the machine
as it is now, and what a calibrated card does on what was measured here: neither is kept.
"""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from foretrain.advice.advisor import short_list as shortened
from foretrain.advice.asked import Asked
from foretrain.advice.best import Best
from foretrain.advice.first_answer import FirstAnswer, first_answer
from foretrain.advice.record import Advices
from foretrain.app import advise, limits
from foretrain.base.cache import Cache
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.catalogue import GPU_FILE_VARIABLE, Gpu, catalogue
from foretrain.predict import software
from foretrain.predict.plan import Plan
from foretrain.predict.plan import plan as predict_plan
from foretrain.predict.ranks import ClusterPlan

Kept = TypeVar("Kept", bound=Record)
MOST = 300  # answers, of some kilobytes each
PLANS = Cache("plans", compressed=True, most_files=MOST)
ROOMS = ("base", "config", "data", "hardware", "model", "predict", "runs", "measure", "advice")  # that decide an answer


@cache
def code() -> str:
    """A hash of what answers come from: our code with its tables, and what checks records."""
    digest = hashlib.sha256(pydantic.VERSION.encode())
    for room in ROOMS:
        for folder, folders, files in os.walk(Path(__file__).parents[2] / room):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".toml")):
                    digest.update(f"{room}/{name}".encode() + Path(folder, name).read_bytes())
    return digest.hexdigest()


def answer(
    what: str, question: dict[str, Any], gpu: Gpu, config: RunConfig, kind: type[Kept], make: Callable[[], Kept]
) -> Kept:
    """The answer to a question about a config on a card, made where it is not kept. Raises what `make` raises."""
    changes = config.init_from not in ("scratch", *GPT2_SHAPES)  # a file of weights can
    # nor is what was measured here in a card's record
    if gpu.kind != "cuda" or gpu.calibration is not None or gpu.choices or changes:
        return make()
    own = [card.model_dump(mode="json") for card in catalogue().values()] if os.environ.get(GPU_FILE_VARIABLE) else []
    path = PLANS.path({"what": what, **question, "torch": str(software.of("")), "cards": own, "code": code()})
    if (found := PLANS.record(path, kind)) is not None:
        return found
    made = make()
    PLANS.keep(path, made.model_dump_json())
    return made


def plan(config: RunConfig, gpu: Gpu, **given: Any) -> Plan:
    """The same as `predict.plan.plan`. Raises UserError as it does."""
    question = {"config": config.model_dump(mode="json"), "gpu": gpu.model_dump(mode="json"), "given": given}
    return answer("plan", question, gpu, config, Plan, lambda: predict_plan(config, gpu, **given))


class ShortList(Record):
    """What a plan's screen shows of advice; None where nothing pays."""

    found: Advices | None


def _of(plan: Plan | ClusterPlan) -> dict[str, Any]:
    return {"plan": plan.model_dump(mode="json")}


def first(plan: Plan, asked: Asked) -> FirstAnswer:
    """The same as `advice.first_answer`."""
    question = {**_of(plan), "asked": asked.model_dump(mode="json")}
    return answer("first", question, plan.gpu, plan.config, FirstAnswer, lambda: first_answer(plan, asked))


def short_list(plan: Plan) -> Advices | None:
    """The same as `advice.advisor.short_list`, of the step that is meant."""

    def make() -> ShortList:
        return ShortList(found=shortened(plan, plan.step))

    return answer("short", _of(plan), plan.gpu, plan.config, ShortList, make).found


def base_plan(resolved: ResolvedConfig, gpu: str, used_by_others: str, price: str | None) -> Plan:
    """The same as `app.advise.base_plan`. Raises UserError as it does."""
    return advise.base_plan(resolved, gpu, used_by_others, price, by=plan)


def advices(base: Plan, goal: str | None, price: str | None) -> Advices:
    """The same as `app.advise.advices`. Raises UserError as it does."""

    def make() -> Advices:
        return advise.advices(base, goal, price)  # type: ignore[arg-type]

    question = {**_of(base), "goal": goal, "price": price}
    return answer("advices", question, base.gpu, base.config, Advices, make)


def best(plan: Plan | ClusterPlan, asked: limits.Limits, listen: Callable[[int, int], None]) -> Best:
    """The same as `app.limits.best_of`, of the step that is meant. Raises UserError as it does."""

    def make() -> Best:
        return limits.best_of(plan, asked, listen)

    question = {**_of(plan), "limit": asked.limit().model_dump(mode="json"), "given": sorted(asked.given)}
    return answer("best", question, plan.gpu, plan.config, Best, make)
