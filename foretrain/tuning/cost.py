"""What a trial of `foretrain tune` takes, so that a short budget goes to settings that there is time for."""

import math
from collections.abc import Sequence

from foretrain.config.options import RunConfig

WHOLE_S = 1.0  # a step that takes longer is timed by some of its micro-batches
FEWEST_STEPS = 2  # of a burst
START_S, COMPILE_S = 5.0, 30.0  # what starting a child costs, until it was seen
EXPLORE_S, RACE_S = 0.25, 0.4  # of one burst
WARM_UP_STEPS = 2
FIRST_SHARE = 0.4  # of the budget, at most, for the first trial
TRIALS = 3  # below which a search has not looked around


def burst_s(config: RunConfig, step_s: float, seconds: float = EXPLORE_S) -> float:
    """What a burst takes: FEWEST_STEPS at least, of which long ones are cut short to a few micro-batches."""
    micro_s = step_s / config.gradient_accumulation_steps
    count = min(config.gradient_accumulation_steps, max(2, math.ceil(WHOLE_S / micro_s))) if micro_s else 1
    return max(seconds, FEWEST_STEPS * count * micro_s)


def start_s(config: RunConfig, step_s: float) -> float:
    """What it takes until a child is ready."""
    warm_s = WARM_UP_STEPS / FEWEST_STEPS * burst_s(config, step_s, 0.0)
    return START_S + (COMPILE_S if config.compile else 0.0) + warm_s


def first_trial(configs: Sequence[RunConfig], steps_s: Sequence[float], wanted: int, budget_s: float) -> int:
    """The setting to begin with: the wanted one where its trial takes a part of the budget by the forecast; else the
    fastest one of which that is so, or whose trial is the shortest."""

    def cost_s(n: int) -> float:
        return start_s(configs[n], steps_s[n]) + burst_s(configs[n], steps_s[n])

    room_s = FIRST_SHARE * budget_s
    if cost_s(wanted) <= room_s:
        return wanted
    short = [n for n in range(len(configs)) if cost_s(n) <= room_s]
    return min(short, key=lambda n: steps_s[n]) if short else min(range(len(configs)), key=cost_s)


def looking_around_s(costs_s: Sequence[float], wanted: int | None) -> float:
    """The wanted setting's trial and the shortest others, TRIALS together."""
    others = sorted(cost_s for n, cost_s in enumerate(costs_s) if n != wanted)
    own = [costs_s[wanted]] if wanted is not None else []
    return sum((own + others)[:TRIALS])


def rounded_up(seconds: float) -> str:
    """A time as --budget takes it, rounded up: '90s', '4min'."""
    if seconds <= 120:
        return f"{math.ceil(seconds / 10) * 10}s"
    return f"{math.ceil(seconds / 60)}min"
