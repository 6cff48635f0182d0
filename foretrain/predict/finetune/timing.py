"""How long a whole fine-tuning run takes, and what it costs. No torch."""

from typing import Literal

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.energy import Prices, Spending, spending
from foretrain.predict.finetune.model_flops import model_flops
from foretrain.predict.finetune.time import StepWork, step_s
from foretrain.predict.speed.ops import flops
from foretrain.predict.speed.time import Range

Source = Literal["estimated", "measured (log)"]
PRICES = Prices.of(RunConfig())  # of electricity, as for any run


class FineTuneTiming(Spending):
    """Times of the run. `total_s` is None where neither the data nor the steps are known; then energy and money are
    those of one step. `mfu`: the share of the peak of what the model needs (model_flops.py); `hfu`: of all that runs,
    recomputation included. None where the card's peak is not known."""

    source: Source = "estimated"
    step_s: Range
    tokens_per_s: float
    flops_per_step: int
    hardware_flops_per_step: int
    mfu: float | None
    hfu: float | None
    steps: int | None = None
    total_s: Range | None = None
    prices: Prices = PRICES


def timing(facts: ModelFacts, tune: FineTune, gpu: Gpu, prices: Prices = PRICES) -> FineTuneTiming | None:
    """How long it takes and what it costs; None where the card's speed is not known."""
    found = step_s(facts, tune, gpu)
    if found is None:
        return None
    each, counted = found
    return _timing(tune, gpu, prices, each, (model_flops(facts, tune, gpu), counted))


def logged(facts: ModelFacts, tune: FineTune, gpu: Gpu, seconds: float, prices: Prices = PRICES) -> FineTuneTiming:
    """The same from the seconds of a step in a log, on any card."""
    each = Range(low_s=seconds, expected_s=seconds, high_s=seconds)
    counted = model_flops(facts, tune, gpu), tune.grad_accum * flops(StepWork(facts, tune, gpu).micro)
    return _timing(tune, gpu, prices, each, counted, "measured (log)")


def _timing(
    tune: FineTune, gpu: Gpu, prices: Prices, each: Range, counted: tuple[int, int], source: Source = "estimated"
) -> FineTuneTiming:
    """`counted`: FLOPs of a step, those of the model and all that run."""
    peak = gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16")
    mfu, hfu = (each_flops / each.expected_s / peak if peak else None for each_flops in counted)
    step = FineTuneTiming(
        source=source, step_s=each, tokens_per_s=tune.tokens_per_step / each.expected_s,
        flops_per_step=counted[0], hardware_flops_per_step=counted[1], mfu=mfu, hfu=hfu, prices=prices,
    )  # fmt: skip
    return with_steps(step, gpu, tune.steps)


def with_steps(found: FineTuneTiming, gpu: Gpu, steps: int | None) -> FineTuneTiming:
    """The timing of the same run with another number of steps; of None, energy and money are those of one. What is
    recomputed draws power too."""
    total = found.step_s.scaled(steps) if steps else None
    spent = spending(found.prices, gpu, found.hfu, total or found.step_s)
    return found.model_copy(update={"steps": steps, "total_s": total, **dict(spent)})
