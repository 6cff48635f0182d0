"""Records of a `foretrain tune` search: every trial with its forecast, and the final setting."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foretrain.base.records import Record
from foretrain.base.statistics import t_quantile
from foretrain.config.options import RunConfig

SCHEMA = "foretrain.tune/1"

# best: the pick; as_good: not distinguished from it and within a percent; close: not distinguished, but probably
# slower; changed: its loss on the same rows differs, so it is not the same training.
Verdict = Literal["best", "as_good", "close", "slower", "memory", "timeout", "failed", "changed"]
# decided: distinguished; alike: those left are too much alike; budget: no time left; interrupted: by the user.
Stop = Literal["decided", "alike", "budget", "interrupted"]


class TuneTrial(Record):
    """One tried setting. `options`: its level of each option. `step_s` is measured in turns with the pick's steps;
    `peak_bytes` is the process's on a CPU, and reserved memory and context on a card. `pareto`: none other is faster in
    less memory."""

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
    """Errors of the forecast over the trials, predicted over measured: median, median deviation, and largest."""

    trials: int
    middle: float
    spread: float
    worst: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float | None, float | None]]) -> "ForecastError | None":
        logs = [math.log(predicted / measured) for predicted, measured in pairs if predicted and measured]
        if not logs:
            return None
        middle = statistics.median(logs)
        spread = statistics.median(abs(x - middle) for x in logs)
        worst = max(logs, key=abs)
        return cls(trials=len(logs), middle=math.exp(middle), spread=math.expm1(spread), worst=math.exp(worst))


class Tuning(Record):
    """The answer. `config` is the pick, with everything decided; `trials` has it first, then the others by speed.

    `world`: how many of the device share each step. `gain`: the pick's extra tokens/s as a share of the given config's.
    `clock`: wall time or the process's. `elsewhere`: share that other programs used. `first_choice`: by what share the
    forecast's own first choice is slower. `least_budget_s`: for a minimal search. `fed`: trials that now correct plans.
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


# In a round every setting in the race is timed once, so that drift (clocks, other programs, heat) is in all of them.
# Differences are of logarithms. Their mean is trimmed, as other programs may disturb a round, and its bounds are those
# of Yuen and Tukey: Student's t on the winsorized deviation (Tukey and McLaughlin 1963, Sankhya A 25, 331).

NEAR = 0.01  # settings that differ by less are as good as each other
CONFIDENCE = 0.95  # of all bounds of a race together: its settings, and its looks
LOOKS = (3, 4, 6, 8, 12, 16, 24)  # rounds after which something is decided; each more is a chance to err
TRIM = 0.2  # of the rounds, at each end
FINEST = 0.002  # no two rounds agree better than by chance


@dataclass(frozen=True)
class Estimate:
    """A mean of logarithms and the half width of its bounds, infinite where undetermined."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    n = len(values)
    ordered = sorted(values)
    cut = int(TRIM * n)
    kept = ordered[cut : n - cut]
    mean = statistics.fmean(kept)
    dof = n - 2 * cut - 1
    if dof < 1:
        return Estimate(mean, math.inf)
    winsorized = [min(max(v, kept[0]), kept[-1]) for v in ordered]
    middle = statistics.fmean(winsorized)
    deviation = max(math.sqrt(sum((v - middle) ** 2 for v in winsorized) / (n - 1)), FINEST)
    error = deviation / ((1 - 2 * cut / n) * math.sqrt(n))
    return Estimate(mean, t_quantile((1 + confidence) / 2, dof) * error)


class Race:
    def __init__(self, entrants: Sequence[int], near: float = NEAR) -> None:
        self.alive, self.near = list(entrants), near
        self.rounds: list[dict[int, float]] = []  # log seconds of each that was timed
        self.dropped: dict[int, int] = {}  # who dropped out, and in which round

    def add(self, seconds: dict[int, float]) -> None:
        """Add one round's times; a setting without one has ended and drops out."""
        self.rounds.append({number: math.log(s) for number, s in seconds.items()})
        self.alive = [number for number in self.alive if number in seconds]
        if self.looks and self.alive:
            best, level = self.best, self.level
            for number in [n for n in self.alive if n != best]:
                if self.against(number, best, level).low > 0:
                    self.alive.remove(number)
                    self.dropped[number] = len(self.rounds)

    @property
    def looks(self) -> bool:
        return len(self.rounds) in LOOKS

    @property
    def level(self) -> float:
        """Return the confidence of one bound, so that those of all pairs hold together at all looks (Bonferroni)."""
        pairs = len(self.alive) * (len(self.alive) - 1) / 2
        return 1 - (1 - CONFIDENCE) / (max(1.0, pairs) * len(LOOKS))

    @property
    def best(self) -> int:
        centred: dict[int, list[float]] = {number: [] for number in self.alive}
        for row in self.rounds:
            middle = statistics.fmean(row[number] for number in self.alive)
            for number in self.alive:
                centred[number].append(row[number] - middle)
        return min(self.alive, key=lambda number: estimate(centred[number]).mean)

    def against(self, number: int, other: int, confidence: float = CONFIDENCE) -> Estimate:
        """Return how much longer a setting's steps are, in logarithms, over the rounds that have both."""
        shared = [row[number] - row[other] for row in self.rounds if number in row and other in row]
        return estimate(shared, confidence) if shared else Estimate(math.nan, math.inf)

    @property
    def decided(self) -> bool:
        if len(self.alive) < 2:
            return True
        if not self.looks:
            return False
        best, level = self.best, self.level
        return all(self.against(n, best, level).low >= -self.near for n in self.alive if n != best)


WHOLE_S = 1.0  # a step that takes longer is timed by some of its micro-batches
FEWEST_STEPS = 2  # of a burst
START_S, COMPILE_S = 5.0, 30.0  # what starting a child costs, until it was seen
EXPLORE_S, RACE_S = 0.25, 0.4  # of one burst
WARM_UP_STEPS = 2
FIRST_SHARE = 0.4  # of the budget, at most, for the first trial
TRIALS = 3  # below which a search is too small


def burst_s(config: RunConfig, step_s: float, seconds: float = EXPLORE_S) -> float:
    """Return what a burst takes: at least FEWEST_STEPS, of which long ones are cut short to a few micro-batches."""
    micro_s = step_s / config.gradient_accumulation_steps
    count = min(config.gradient_accumulation_steps, max(2, math.ceil(WHOLE_S / micro_s))) if micro_s else 1
    return max(seconds, FEWEST_STEPS * count * micro_s)


def start_s(config: RunConfig, step_s: float) -> float:
    warm_s = WARM_UP_STEPS / FEWEST_STEPS * burst_s(config, step_s, 0.0)
    return START_S + (COMPILE_S if config.compile else 0.0) + warm_s


def first_trial(configs: Sequence[RunConfig], steps_s: Sequence[float], wanted: int, budget_s: float) -> int:
    """Return the first setting: the wanted one if its trial takes a part of the budget; else the fastest such."""

    def cost_s(n: int) -> float:
        return start_s(configs[n], steps_s[n]) + burst_s(configs[n], steps_s[n])

    room_s = FIRST_SHARE * budget_s
    if cost_s(wanted) <= room_s:
        return wanted
    short = [n for n in range(len(configs)) if cost_s(n) <= room_s]
    return min(short, key=lambda n: steps_s[n]) if short else min(range(len(configs)), key=cost_s)


def looking_around_s(costs_s: Sequence[float], wanted: int | None) -> float:
    others = sorted(cost_s for n, cost_s in enumerate(costs_s) if n != wanted)
    own = [costs_s[wanted]] if wanted is not None else []
    return sum((own + others)[:TRIALS])


def rounded_up(seconds: float) -> str:
    """Return a time as --budget takes it, rounded up: '90s', '4min'."""
    if seconds <= 120:
        return f"{math.ceil(seconds / 10) * 10}s"
    return f"{math.ceil(seconds / 60)}min"
