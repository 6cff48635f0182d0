"""How long a whole fine-tuning run takes, and what it costs. No torch."""

import math
from typing import Literal

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.energy import Prices, Spending, spending
from foretrain.predict.finetune.time import step_s
from foretrain.predict.speed.time import Range

PRICES = Prices.of(RunConfig())  # of electricity, as for any run


class FineTuneTiming(Spending):
    """Times of the run. `total_s` is None where neither the data nor the steps are known; then energy and money are
    those of one step."""

    source: Literal["estimated"] = "estimated"
    step_s: Range
    tokens_per_s: float
    flops_per_step: int
    mfu: float | None
    steps: int | None = None
    total_s: Range | None = None
    prices: Prices = PRICES


def timing(facts: ModelFacts, tune: FineTune, gpu: Gpu, prices: Prices = PRICES) -> FineTuneTiming | None:
    """How long it takes and what it costs; None where the card's speed is not known."""
    found = step_s(facts, tune, gpu)
    if found is None:
        return None
    each, flops = found
    tokens_per_s = tune.tokens_per_step / each.expected_s
    peak = gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16")
    mfu = flops / each.expected_s / peak if peak else None
    steps = tune.max_steps or (math.ceil(tune.dataset_tokens * tune.epochs / tune.tokens_per_step) or None)
    total = each.scaled(steps) if steps else None
    spent = spending(prices, gpu, mfu, total or each)
    return FineTuneTiming(
        step_s=each, tokens_per_s=tokens_per_s, flops_per_step=flops, mfu=mfu, steps=steps, total_s=total,
        prices=prices, **dict(spent),
    )  # fmt: skip
