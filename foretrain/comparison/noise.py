"""How far two figures of training runs must lie apart before the distance means something.

Three parts, added as variances:

* within a run: moving-block bootstrap over its steps (Künsch 1989, Annals of Statistics 17:1217), blocks as long as the
  steps remember each other, so that drift and autocorrelation count; Student's t where blocks are few;
* between two starts of the same speed test: RUN_TO_RUN, which no single run can show of itself;
* between two seeds of the same training: SEED_TO_SEED, likewise.

The floors are standard deviations of one run; benchmarks/compare_power.py measures what they are worth. Everything is
deterministic: the resampling has a fixed seed.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import NormalDist, fmean, median

from foretrain.base.records import Record
from foretrain.base.student import t_quantile

LEVEL = 0.99  # of the intervals; several questions are asked at once, and a false alarm costs more than a longer run
RUN_TO_RUN = 0.004  # of a card's step time: clocks, temperature, memory layout differ from start to start
RUN_TO_RUN_CPU = 0.02  # a CPU shares its cores, caches and memory with everything else
SEED_TO_SEED = 0.004  # of a loss: weights, order of the data
POINTS = 240  # a longer series is first reduced to as many medians or means of neighbours
RESAMPLES = 200
FEWEST = 5  # values below which a series says nothing of its own noise
LEAST_FREEDOM = 3.0  # degrees of freedom; a bootstrap of so few blocks knows no better what fewer would mean
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Interval(Record):
    """A relative difference (0.03: 3 %) and the bounds of its 99 % interval. `count`: values of the shorter series.

    `beyond`: the interval leaves out zero.
    """

    share: float
    low: float
    high: float
    count: int

    @property
    def beyond(self) -> bool:
        return self.low > 0 or self.high < 0


def reduced(values: Sequence[float], middle: Callable[[Sequence[float]], float], most: int = POINTS) -> list[float]:
    """At most `most` middles of groups of neighbours."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [middle(values[a:b]) for a, b in pairwise(edges)]


def block_length(values: Sequence[float]) -> int:
    """Three times the integrated autocorrelation, at least the cube root of the count, at most a fifth of it."""
    count = len(values)
    mean = fmean(values)
    centred = [value - mean for value in values]
    variance = sum(c * c for c in centred)
    memory = 1.0
    for lag in range(1, count // 4 + 1) if variance > 0 else ():
        rho = sum(a * b for a, b in zip(centred, centred[lag:], strict=False)) / variance
        if rho < 2 / math.sqrt(count):
            break
        memory += 2 * rho
    return max(1, min(count // 5, math.ceil(max(3 * memory, count ** (1 / 3)))))


def bootstrap(
    values: Sequence[float], middle: Callable[[Sequence[float]], float] = median, seed: int = 20
) -> tuple[float, float, float]:
    """(middle, its standard error, degrees of freedom) by a circular moving-block bootstrap.

    With fewer than FEWEST values the error is NaN: they cannot tell.
    """
    centre = middle(values)
    if len(values) < FEWEST:
        return centre, math.nan, 0.0
    points = reduced(values, middle)
    count, length = len(points), block_length(points)
    blocks = math.ceil(count / length)
    random = Random(seed)
    circle = points + points[:length]
    found = []
    for _ in range(RESAMPLES):
        sample: list[float] = []
        for _ in range(blocks):
            start = int(random.random() * count)
            sample += circle[start : start + length]
        found.append(middle(sample[:count]))
    mean = fmean(found)
    error = math.sqrt(sum((value - mean) ** 2 for value in found) / (RESAMPLES - 1))
    effective = count / length
    return centre, error * math.sqrt(effective / (effective - 1)), effective - 1


def of_times(one_s: Sequence[float], other_s: Sequence[float], run_to_run: float = RUN_TO_RUN) -> Interval | None:
    """How much longer the steps of `other_s` take than those of `one_s`; None where a series is too short to tell.

    `run_to_run`: the deviation between starts of the same run, as a share.
    """
    first, second = (bootstrap([math.log(t) for t in times], seed=seed) for times, seed in ((one_s, 20), (other_s, 21)))
    if math.isnan(first[1]) or math.isnan(second[1]):
        return None
    share = second[0] - first[0]
    half = _half(first[1], first[2], second[1], second[2], run_to_run * math.sqrt(2))
    return Interval(
        share=math.expm1(share), low=math.expm1(share - half), high=math.expm1(share + half),
        count=min(len(one_s), len(other_s)),
    )  # fmt: skip


def of_differences(differences: Sequence[float], level: float, floor: float) -> Interval:
    """Paired differences of two losses as a share of `level`. `floor`: the deviation that no series shows.

    Fewer than FEWEST differences add nothing to the floor.
    """
    mean, error, df = bootstrap(differences, fmean)
    half = _half(0.0 if math.isnan(error) else error / level, df, 0.0, 0.0, floor)
    share = mean / level
    return Interval(share=share, low=share - half, high=share + half, count=len(differences))


def _half(error_a: float, df_a: float, error_b: float, df_b: float, floor: float) -> float:
    """Half of the interval: Welch's degrees of freedom for what was measured, the normal for the floor."""
    error = math.hypot(error_a, error_b)
    parts = sum(e**4 / df for e, df in ((error_a, df_a), (error_b, df_b)) if e and df)
    df = error**4 / parts if parts else math.inf
    t = _Z if math.isinf(df) else t_quantile((1 + LEVEL) / 2, max(LEAST_FREEDOM, df))
    return math.hypot(t * error, _Z * floor)
