"""A fine-tuning plan, from what somebody has: a model or a trainer's file, options, a card."""

from collections.abc import Callable, Iterator

from foretrain.advice import finetune as advisor
from foretrain.advice.finetune import SearchedPlan
from foretrain.advice.record import Advice
from foretrain.analysis.log_checks import CLOCK_HEADROOM
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.base.errors import UserError
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.energy import Prices
from foretrain.predict.finetune.plan import FineTunePlan, bounded, check_exact, plan, timed
from foretrain.predict.finetune.traced import exact_finetune
from foretrain.predict.trace import service

ESTIMATED = ("finetune_compile",)  # notes on what only the estimate leaves out


def plan_question(
    asked: FineTuneQuestion, gpu: str | Gpu, used_by_others: str | int = "", step_s: float | None = None
) -> FineTunePlan:
    """Return the forecast on a card. `step_s`: seconds of a step in a log. Raises UserError."""
    if isinstance(used_by_others, str):
        used_by_others = stated_bytes(used_by_others, "--used-by-others") if used_by_others else 0
    stated = used_by_others or None
    target = devices.checked(gpu, stated or 0) if isinstance(gpu, Gpu) else devices.target(gpu, stated)
    if target.gpu.kind != "cuda" or not target.gpu.is_trained_on:
        raise UserError("usage.finetune_needs_cuda", gpu=target.gpu.name)
    others, prices = target.used_by_others_bytes, asked.prices
    unplanned = asked.unplanned
    found = plan(asked.source, asked.tune, target.gpu, used_by_others_bytes=others, prices=prices, unplanned=unplanned)
    found = found.model_copy(update={"notes": (*asked.notes, *found.notes)})
    return found if step_s is None else _timed(found, step_s, prices)


def _timed(found: FineTunePlan, step_s: float, prices: Prices) -> FineTunePlan:
    if found.tune.bound != "exact":
        check_exact(found, "--step-time")
    made, gpu = timed(found, step_s, prices), found.gpu
    timing = made.timing
    if timing and timing.hfu and timing.hardware_flops_per_step and timing.hfu > CLOCK_HEADROOM:
        values = {"value": f"{step_s:g}", "hfu": timing.hfu, "gpu": gpu.name, "tokens": found.tune.tokens_per_step}
        peak = timing.hardware_flops_per_step / step_s / timing.hfu
        raise UserError("usage.finetune_step_time", option="--step-time", peak=peak, step=step_s, **values)
    return made


def traced(
    found: FineTunePlan, asked: FineTuneQuestion, listen: Callable[[str], None], settings: Settings | None = None
) -> FineTunePlan:
    """Trace the plan's memory in the real Trainer's loop. Raises UserError where that cannot be traced."""
    if found.tune.bound != "exact":
        check_exact(found, "--exact")
    if found.facts is None:
        return found  # it is traced already
    try:
        exact = exact_finetune(asked.source, found.tune, found.gpu, found.available_bytes, listen, settings)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None
    notes = tuple(note for note in found.notes if note.id not in ESTIMATED)
    return found.model_copy(update={"memory": bounded(exact.memory, found.bound), "notes": (*notes, *exact.notes)})


def advised(found: SearchedPlan) -> tuple[Advice, ...]:
    """Return what to change, best first; nothing where the run fits."""
    steps = list(searched(found))
    return steps[-1] if steps else ()


def searched(found: SearchedPlan) -> Iterator[tuple[Advice, ...]]:
    """Yield what `advised` has found so far; nothing where each change would need a trace."""
    if isinstance(found, FineTunePlan) and found.facts is None:
        return iter(())
    bounded = isinstance(found, FineTunePlan) and found.bound != "exact"
    return iter(()) if found.verdict in ("fits", None) or bounded else advisor.searched(found)
