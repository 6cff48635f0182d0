"""`foretrain tune`: the setting that trains fastest on this machine. The forecast ranks the settings, each trial, timed
in turns with the config as given, corrects it, and the best few race."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import erf
from typing import Any, Protocol

import numpy as np

from foretrain.base.errors import UserError
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.measure.pool import Burst
from foretrain.measure.space import TUNABLE, Setting, fitting, forecast_memory, forecast_s, log_forecasts
from foretrain.measure.trial import Fault
from foretrain.measure.tune_record import (
    EXPLORE_S,
    LOOKS,
    NEAR,
    RACE_S,
    TRIALS,
    Estimate,
    Race,
    Stop,
    burst_s,
    estimate,
    first_trial,
    looking_around_s,
    start_s,
)
from foretrain.predict.memory import RunMemory

# The logarithm of measured over forecast time is modelled as a sum of effects of each option's level and of pairs of
# levels, and a smooth function of the micro-batch: a Gaussian process (Rasmussen and Williams 2006, equations 2.25 and
# 2.26). So one trial informs all its neighbours. The next trial has the highest expected improvement (Jones, Schonlau
# and Welch 1998) for its time.

Array = np.ndarray

# Standard deviations, in logarithms, of a forecast by the catalogue; by a calibration it is half.
SPREAD = {name: option.tuned.spread for name, option in OPTIONS.items() if option.tuned and option.tuned.spread}
PAIRED, PAIR_SPREAD = named(lambda option: option.tuned and option.tuned.paired), 0.08
TREND = 0.04  # a doubling of the micro-batch
BATCH, BATCH_LENGTH = 0.12, 2.0  # the length is in doublings
BATCH_WITH, BATCH_WITH_LENGTH = 0.06, 1.5  # the micro-batch with one combination of the other options
ALL, ALONE = 1.0, 0.02  # all of them together, and each one for itself


class Model:
    def __init__(self, settings: Sequence[Setting], log_forecasts: Sequence[float], *, calibrated: bool) -> None:
        self.prior = np.asarray(log_forecasts, dtype=float)
        self.scale = 0.5 if calibrated else 1.0
        columns = list(zip(*(setting.levels for setting in settings), strict=True))
        self.codes = {name: _coded(column) for name, column in zip(TUNABLE, columns, strict=True)}
        self.batch = np.log2(np.asarray(columns[0], dtype=float))
        self.batch -= self.batch.mean()
        self.others = _coded([setting.levels[1:] for setting in settings])
        self.tried: list[int] = []
        self.values: list[float] = []
        self.noises: list[float] = []

    def observe(self, number: int, log_s: float, noise: float) -> None:
        """Take a measurement with its standard deviation; a later one of the same setting replaces it."""
        if number in self.tried:
            at = self.tried.index(number)
            self.values[at], self.noises[at] = log_s, noise
        else:
            self.tried.append(number)
            self.values.append(log_s)
            self.noises.append(noise)

    def _covariance(self, left: Array, right: Array) -> Array:
        def same(codes: Array) -> Array:
            return (codes[left][:, None] == codes[right][None, :]).astype(float)

        found = sum((SPREAD[name] ** 2 * same(self.codes[name]) for name in SPREAD), np.zeros((len(left), len(right))))
        for i, one in enumerate(PAIRED):
            for other in PAIRED[i + 1 :]:
                found += PAIR_SPREAD**2 * same(self.codes[one]) * same(self.codes[other])
        apart = (self.batch[left][:, None] - self.batch[right][None, :]) ** 2
        found += BATCH**2 * np.exp(-apart / (2 * BATCH_LENGTH**2))
        found += BATCH_WITH**2 * np.exp(-apart / (2 * BATCH_WITH_LENGTH**2)) * same(self.others)
        found += TREND**2 * self.batch[left][:, None] * self.batch[right][None, :]
        found += ALONE**2 * (left[:, None] == right[None, :])
        return self.scale**2 * found + ALL**2

    def posterior(self) -> tuple[Array, Array]:
        every = np.arange(len(self.prior))
        alone = sum(s**2 for s in (*SPREAD.values(), BATCH, BATCH_WITH, ALONE))
        alone += PAIR_SPREAD**2 * len(PAIRED) * (len(PAIRED) - 1) / 2
        own = self.scale**2 * (alone + TREND**2 * self.batch**2) + ALL**2
        if not self.tried:
            return self.prior.copy(), np.sqrt(own)
        tried = np.asarray(self.tried)
        matrix = self._covariance(tried, tried) + np.diag(np.square(self.noises))
        cross = self._covariance(every, tried)
        residual = np.asarray(self.values) - self.prior[tried]
        weights = np.linalg.solve(matrix, np.column_stack([residual, cross.T]))
        mean = self.prior + cross @ weights[:, 0]
        variance = own - np.einsum("ij,ji->i", cross, weights[:, 1:])
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def improvement(self) -> Array:
        """Return the expected improvement on the best tried setting, in logarithms; 0 for tried ones."""
        mean, deviation = self.posterior()
        best = min(mean[number] for number in self.tried)
        z = (best - mean) / deviation
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        found = (best - mean) * _normal(z) + deviation * density
        found[self.tried] = 0.0
        return np.asarray(np.maximum(found, 0.0))


def _coded(column: Sequence[object]) -> Array:
    numbers: dict[object, int] = {}
    return np.asarray([numbers.setdefault(value, len(numbers)) for value in column])


def _normal(z: Array) -> Array:
    return np.asarray([0.5 * (1 + erf(x / 2**0.5)) for x in z])


# Bursts of a trial, each beside one of the reference: more where they disagree, as something else was running.
PAIRS, MOST_PAIRS, AGREE = 3, 7, 0.04
EXPLORING = 0.65  # share of the budget, at most, before the race
ENOUGH = 0.0015  # stop where no trial promises more than this share of a step's time
ENDING_S = 5.0  # how late a trial may end
FINALISTS, WITHIN = 6, 0.06
UNPAIRED_NOISE, FINEST_NOISE = 0.08, 0.01
ALIKE = 0.02  # forecasts of memory that differ by less are the same
LOSS_TOLERANCE = {"float32": 1e-3}  # relative; half precision rounds more
HALF_TOLERANCE = 1e-2


Listen = Callable[[str, dict[str, Any]], None]


class Bench(Protocol):
    def burst(self, config: RunConfig, seconds: float, limit_s: float, expected_bytes: int | None) -> Burst | Fault: ...

    def evaluate(self, config: RunConfig, limit_s: float, expected_bytes: int | None) -> int | Fault: ...

    def holds(self, config: RunConfig) -> bool: ...

    def drop(self, config: RunConfig) -> None: ...


@dataclass(frozen=True)
class Outlook:
    """Where the settings run, for their forecasts. `room_bytes`: for a process; `world`: how many share a step."""

    gpu: Gpu
    dtype: Dtype
    room_bytes: int | None
    calibrated: bool
    world: int = 1

    def step_s(self, config: RunConfig) -> float | None:
        return forecast_s(config, self.gpu, self.dtype, self.world)

    def memory(self, config: RunConfig) -> RunMemory:
        return forecast_memory(config, self.gpu, self.dtype, self.room_bytes, self.world)


@dataclass(frozen=True)
class Limits:
    """Limits of time and of settings; None: a quarter of the space, 4 to 24."""

    budget_s: float = 180.0
    most_trials: int | None = None


@dataclass
class TriedSetting:
    number: int
    predicted_s: float | None
    predicted_bytes: int
    ratios: list[float] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    started_s: float = 0.0
    peak_bytes: int = 0
    failure: Fault | None = None
    changed: bool = False
    paired: bool = True

    @property
    def middle(self) -> float:
        return statistics.median(self.ratios)

    @property
    def agrees(self) -> bool:
        ordered = sorted(self.ratios)
        cut = (len(ordered) - 1) // 3
        return len(ordered) >= PAIRS and ordered[len(ordered) - 1 - cut] - ordered[cut] <= AGREE

    @property
    def lives(self) -> bool:
        return self.failure is None and not self.changed and bool(self.bursts)


class Tuner:
    """One search. `settings`: the first one is the config as given. `clock()`: seconds, any origin."""

    def __init__(
        self,
        settings: Sequence[Setting],
        outlook: Outlook,
        bench: Bench,
        limits: Limits,
        clock: Callable[[], float],
        listen: Listen = lambda id, values: None,
    ) -> None:
        self.outlook, self.bench, self.clock, self.listen = outlook, bench, clock, listen
        self.total, self.base = len(settings), settings[0].config
        self.settings = fitting(settings, outlook.gpu, outlook.dtype, outlook.room_bytes, outlook.world)
        self.given = 0 if self.settings and self.settings[0] is settings[0] else None
        self.most = limits.most_trials or min(24, max(4, self.total // 4))
        self.budget_s, self.end = limits.budget_s, clock() + limits.budget_s
        self.explore_end = clock() + EXPLORING * limits.budget_s
        self.tried: dict[int, TriedSetting] = {}
        self.closed: set[int] = set()  # no longer of interest
        self.reference: int | None = None
        self.race = Race([])
        self.winner: int | None = None
        self.stop: Stop = "decided"
        self.edge_bytes = math.inf  # what is forecast to take as much is not tried
        self.cut_short = False  # there was no time to search
        self.random = random.Random(self.base.seed)

    def run(self) -> None:
        if not self.settings:
            raise UserError(
                "memory.tune_none_fits", count=self.total, needed=self.outlook.memory(self.base).needed_bytes,
                available=self.outlook.room_bytes or 0,
            )  # fmt: skip
        self.listen("predicted", {"settings": self.total, "fitting": len(self.settings), "trials": self.most})
        forecasts = log_forecasts(self.settings, self.outlook.gpu, self.outlook.dtype, self.outlook.world)
        self.model = Model(self.settings, forecasts, calibrated=self.outlook.calibrated)
        try:
            self._explore()
            self._compete()
            if self.cut_short:
                self.stop = "budget"
        except KeyboardInterrupt:
            self.stop = "interrupted"
            self.listen("interrupted", {})

    def _explore(self) -> None:
        self.steps_s = [math.exp(log_s) for log_s in self.model.prior]
        wanted = self.given if self.given is not None else int(self.model.prior.argmin())
        number = first_trial([s.config for s in self.settings], self.steps_s, wanted, self.budget_s)
        while number is not None and len(self.tried) < self.most:
            self._try(number)
            number = self._next()

    def _next(self) -> int | None:
        left_s = self._left()
        if any(trial.lives for trial in self.tried.values()):
            self.steps_s = [math.exp(log_s) for log_s in self.model.posterior()[0]]
            gains = self.model.improvement()
            gains[list(self.closed)] = 0.0
            costs = {n: self._cost_s(n) for n in map(int, (gains >= ENOUGH).nonzero()[0])}
            order = [n for n, cost_s in costs.items() if cost_s <= left_s]
            order.sort(key=lambda n: -float(gains[n]) / costs[n])
            self.cut_short = bool(costs) and not order
        else:  # where the first ones fail, the next best by forecast; the shortest trial where they took too long
            late = any(trial.failure and trial.failure.reason == "timeout" for trial in self.tried.values())
            order = [n for n in range(len(self.settings)) if n not in self.closed] if left_s > 0 else []
            order.sort(key=lambda n: self._cost_s(n) if late else float(self.model.prior[n]))
        for number in order:
            if self._needed(number) < self.edge_bytes:
                return number
            self.closed.add(number)
        return self._next() if order else None

    def _needed(self, number: int) -> int:
        return self.outlook.memory(self.settings[number].config).needed_bytes

    def _left(self) -> float:
        return self.explore_end - self.clock()

    def _cost_s(self, number: int) -> float:
        """Return the probable time of a trial: a start, as others took, and its bursts beside the reference's."""
        config = self.settings[number].config
        alike = (t for t in self.tried.values() if t.lives and self.settings[t.number].config.compile == config.compile)
        seen = [t.started_s for t in alike]
        ready_s = statistics.median(seen) if seen else start_s(config, self.steps_s[number])
        both = [number, number if self.reference is None else self.reference]
        pair_s = sum(burst_s(self.settings[n].config, self.steps_s[n], EXPLORE_S) for n in both)
        return ready_s + (PAIRS if len(self.tried) >= TRIALS else 1) * pair_s

    def least_budget_s(self) -> float | None:
        """Return the budget for a minimal search, by what was seen and forecast, at least twice what was too little."""
        if sum(trial.lives for trial in self.tried.values()) >= min(TRIALS, self.most, len(self.settings)):
            return None
        costs_s = [self._cost_s(n) for n in range(len(self.settings))]
        return max(2 * self.budget_s, looking_around_s(costs_s, self.given) / EXPLORING)

    def _try(self, number: int) -> None:
        setting = self.settings[number]
        trial = TriedSetting(number, self.outlook.step_s(setting.config), self._needed(number))
        self.tried[number] = trial
        self.closed.add(number)
        self.listen("trying", {"number": len(self.tried), "most": self.most, "setting": setting})
        for _ in range(MOST_PAIRS if self.reference is not None else 1):
            burst = self._burst(number, EXPLORE_S)
            if burst is None:
                break
            self._compare(trial, burst)
            if trial.agrees or not trial.lives or self._left() <= 0:
                break
        if trial.lives and self.reference is None:
            self.reference = number
        if trial.lives:
            self.model.observe(number, trial.middle, self.noise(trial))
        else:
            self.bench.drop(setting.config)
            self._learn_from_failure(trial)
        self.listen("tried", self._outcome(trial))

    def _compare(self, trial: TriedSetting, burst: Burst) -> None:
        """Time the burst beside one of the reference, where that needs no start."""
        log_s = math.log(burst.step_s)
        if self.reference is None:
            self.origin = log_s  # all logarithms are relative to the reference's first burst
            trial.ratios.append(log_s)
            return
        other = None
        if self.bench.holds(self.settings[self.reference].config):
            other = self._burst(self.reference, EXPLORE_S)
        trial.paired = trial.paired and other is not None
        trial.ratios.append(log_s - math.log(other.step_s) + self.origin if other else log_s)

    def _burst(self, number: int, seconds: float) -> Burst | None:
        trial = self.tried[number]
        limit_s = self.end - self.clock()
        if self.reference is None and len(self.tried) == 1 < len(self.settings):  # one trial must not take all the time
            limit_s /= 2
        elif self.reference is not None and not self.race.alive:
            limit_s = min(limit_s, self._left() + ENDING_S)
        limit_s = max(10.0, limit_s)
        found = self.bench.burst(self.settings[number].config, seconds, limit_s, trial.predicted_bytes)
        trial.peak_bytes = max(trial.peak_bytes, found.peak_bytes)
        if isinstance(found, Fault):
            trial.failure = found
            return None
        trial.bursts.append(found)
        trial.started_s = max(trial.started_s, found.started_s)
        trial.changed = trial.changed or self._loss_differs(trial)
        return None if trial.changed else found

    def _loss_differs(self, trial: TriedSetting) -> bool:
        losses = [b.loss for b in trial.bursts if b.loss is not None]
        if self.reference is None or not losses or self.base.dropout:
            return False
        known = [b.loss for b in self.tried[self.reference].bursts if b.loss is not None]
        if not known:
            return False
        dtypes = {self.settings[n].config.dtype for n in (trial.number, self.reference)}
        tolerance = max(LOSS_TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in dtypes)
        return abs(losses[0] - known[0]) > tolerance * abs(known[0])

    def noise(self, trial: TriedSetting) -> float:
        if trial.number == self.reference:
            return FINEST_NOISE
        if not trial.paired or len(trial.ratios) < 2:
            return UNPAIRED_NOISE
        spread = statistics.median(abs(ratio - trial.middle) for ratio in trial.ratios)
        return max(FINEST_NOISE, spread)

    def _learn_from_failure(self, trial: TriedSetting) -> None:
        """Rule out larger settings than one that ran out of memory, and a level that failed twice and never ran."""
        mine = self.settings[trial.number]
        levels = mine.levels
        if trial.failure is not None and trial.failure.reason == "memory":
            for n, other in enumerate(self.settings):
                if other.but_batch == mine.but_batch and int(other.levels[0]) >= int(levels[0]):
                    self.closed.add(n)
            self.edge_bytes = min(self.edge_bytes, (1 - ALIKE) * trial.predicted_bytes)
            return
        for at in range(1, len(levels)):
            alike = [t for t in self.tried.values() if self.settings[t.number].levels[at] == levels[at]]
            others = [t for t in self.tried.values() if t.lives]
            if len(alike) >= 2 and others and not any(t.lives for t in alike):
                self.closed |= {n for n, s in enumerate(self.settings) if s.levels[at] == levels[at]}

    def _outcome(self, trial: TriedSetting) -> dict[str, Any]:
        ratio = trial.middle - self.origin if trial.lives else None
        return {
            "setting": self.settings[trial.number], "failure": trial.failure, "changed": trial.changed,
            "step_s": trial.bursts[-1].step_s if trial.bursts else None, "peak_bytes": trial.peak_bytes,
            "speed": math.exp(-ratio) if ratio is not None else None, "first": trial.number == self.reference,
        }  # fmt: skip

    def _compete(self) -> None:
        """Race among the best few until it is decided; then the winner has to evaluate, too."""
        entrants = self._finalists()
        for trial in self.tried.values():
            if trial.number not in entrants:
                self.bench.drop(self.settings[trial.number].config)
        while entrants:
            self.race = Race(entrants)
            while self.race.alive:
                self._rounds()
                self.winner = self._pick()
                if self.winner is None or self._evaluates(self.winner):
                    return
                self.race.alive = [n for n in self.race.alive if n != self.winner]
            # Nobody left can evaluate. Those that dropped out were slower, and may.
            entrants = [n for n in entrants if n in self.race.dropped and self.tried[n].lives]

    def _finalists(self) -> list[int]:
        mean, deviation = self.model.posterior()
        living = sorted((t.number for t in self.tried.values() if t.lives), key=lambda n: float(mean[n]))
        if not living:
            return []
        best = living[0]
        margin = max(WITHIN, 3 * float(deviation[best]))
        round_s = burst_s(self.settings[best].config, math.exp(float(mean[best])), RACE_S)
        most = min(FINALISTS, max(2, int((self.end - self.clock()) / (LOOKS[0] * round_s))))
        chosen = [n for n in living if mean[n] <= mean[best] + margin][:most]
        if self.given is not None and self.given in living and self.given not in chosen:
            chosen.append(self.given)  # for its own sake: the gain is relative to it
        return chosen

    def _rounds(self) -> None:
        while not self.race.decided:
            if self.clock() >= self.end:
                self.stop = "budget"
                return
            if len(self.race.rounds) >= LOOKS[-1]:  # those not distinguished by then are alike
                self.stop = "alike"
                return
            order, seconds = list(self.race.alive), dict[int, float]()
            self.random.shuffle(order)
            for number in order:
                burst = self._burst(number, RACE_S)
                if burst is not None:
                    seconds[number] = burst.step_s
            self.race.add(seconds)
            for number in order:
                if number not in self.race.alive:
                    self.bench.drop(self.settings[number].config)
            event = {"round": len(self.race.rounds), "alive": len(self.race.alive)}
            self.listen("round", event)
        self.stop = "decided"

    def _pick(self) -> int | None:
        """Return the fastest; or the config as given where that is as good."""
        if not self.race.alive:
            return None
        best = self.race.best if self.race.rounds else self.race.alive[0]
        if self.given in self.race.alive and self.given != best and self.slower(self.given, best).mean <= NEAR:
            return self.given
        return best

    def slower(self, number: int, other: int) -> Estimate:
        if number == other:
            return Estimate(0.0, 0.0)
        shared = sum(number in row and other in row for row in self.race.rounds)
        if shared >= LOOKS[0]:
            return self.race.against(number, other)
        mine, its = self.tried[number], self.tried[other]
        return Estimate(mine.middle - its.middle, math.hypot(self._half(mine), self._half(its)))

    def _half(self, trial: TriedSetting) -> float:
        if trial.number == self.reference:
            return 0.0
        half = estimate(trial.ratios).half if trial.paired else math.inf
        return half if math.isfinite(half) else 3 * UNPAIRED_NOISE

    def _evaluates(self, number: int) -> bool:
        """Return whether it holds an evaluation; not asked where compiling that takes too long for the doubt."""
        trial, config, room = self.tried[number], self.settings[number].config, self.outlook.room_bytes
        if room is None or (config.compile and trial.peak_bytes < room / 2):
            return True
        found = self.bench.evaluate(config, max(60.0, self.end - self.clock()), trial.predicted_bytes)
        if isinstance(found, Fault):
            trial.failure, trial.peak_bytes = found, max(trial.peak_bytes, found.peak_bytes)
            return False
        trial.peak_bytes = max(trial.peak_bytes, found)
        return True
