"""What `foretrain tune` found, as records: every trial with its forecast, and the setting that it ends with."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from foretrain.base.records import Record
from foretrain.config.options import RunConfig

SCHEMA = "foretrain.tune/2"

# best: the pick; as_good: not told apart from it and within a percent; close: not told apart, but probably slower;
# changed: its loss on the same rows is another one, so it is no way to carry out the same training.
Verdict = Literal["best", "as_good", "close", "slower", "memory", "timeout", "failed", "changed"]
# decided: told apart; alike: those left are too much alike to tell; budget: no time left; interrupted: by the user.
Stop = Literal["decided", "alike", "budget", "interrupted"]


class TuneTrial(Record):
    """One setting that was tried. `options`: its level of each option (`activation_checkpointing`: number of blocks).

    `step_s` with its bounds is measured, in turns with the pick's steps; `peak_bytes` is the process's on a CPU, and
    reserved memory and context on a card. `pareto`: nobody else is faster in less memory.
    """

    options: dict[str, bool | int | str]
    gradient_accumulation_steps: int
    learning: Literal["exact", "rounding", "sharding", "draws"]
    verdict: Verdict
    given: bool = False
    pareto: bool = False
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    started_s: float = 0.0
    bursts: int = 0
    problem: str = ""


class ForecastError(Record):
    """How far the forecast was off, over the trials: `middle` is the median of predicted over measured, `spread` the
    median deviation from it (what is left once the middle is corrected), `worst` the ratio farthest from one."""

    trials: int
    middle: float
    spread: float
    worst: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float | None, float | None]]) -> "ForecastError | None":
        """Of (predicted, measured) pairs; None where no pair is whole."""
        logs = [math.log(predicted / measured) for predicted, measured in pairs if predicted and measured]
        if not logs:
            return None
        middle = statistics.median(logs)
        spread = statistics.median(abs(x - middle) for x in logs)
        worst = max(logs, key=abs)
        return cls(trials=len(logs), middle=math.exp(middle), spread=math.expm1(spread), worst=math.exp(worst))


class Tuning(Record):
    """The answer. `config` is the pick, with everything decided; `trials` has it first, then the others by speed.

    `world`: how many of the device share each step; memory is of the one with the most. `gain`: by what share it does
    more tokens a second than the config as given, with its bounds; None where that did not run. `clock`: what was
    counted, wall time or the process's CPU time. `elsewhere`: share of the machine that other programs used, in the
    middle. `first_choice`: by what share the forecast's own first choice is slower than the pick, where it was tried.
    `least_budget_s`: what a look around needs, where there was too little. `fed`: how many of the trials now correct
    this device's plans.
    """

    name: str
    config: RunConfig
    given_options: dict[str, bool | int | str]
    device: str
    world: int = 1
    torch_version: str
    date: str
    tokens_per_step: int
    settings: int
    fitting: int
    trials: tuple[TuneTrial, ...]
    given_fits: bool
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    time_error: ForecastError | None
    memory_error: ForecastError | None
    first_choice: float | None
    calibrated: bool
    stop: Stop
    rounds: int
    took_s: float
    budget_s: float
    most_trials: int
    clock: Literal["wall", "cpu"]
    elsewhere: float
    cap_bytes: int | None
    fed: int = 0
    least_budget_s: float | None = None
    known: bool = False  # from the cache

    @property
    def best(self) -> TuneTrial:
        return self.trials[0]


def with_pareto(trials: Sequence[TuneTrial]) -> tuple[TuneTrial, ...]:
    """The trials with `pareto` set: the frontier of throughput against memory."""
    marked = []
    for trial in trials:
        mine = (trial.tokens_per_s, trial.peak_bytes)
        lives = None not in mine and trial.verdict not in ("memory", "timeout", "failed", "changed")
        beaten = lives and any(
            other is not trial
            and other.verdict not in ("memory", "timeout", "failed", "changed")
            and (other.tokens_per_s or 0) >= (mine[0] or 0)
            and (other.peak_bytes or math.inf) <= (mine[1] or 0)
            and (other.tokens_per_s, other.peak_bytes) != mine
            for other in trials
        )
        marked.append(trial.model_copy(update={"pareto": lives and not beaten}))
    return tuple(marked)
