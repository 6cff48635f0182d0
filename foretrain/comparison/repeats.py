"""The scatter of speed between starts of the same run, learned from repeats: the assumed scatter counts as ASSUMED_AS
degrees of freedom, as empirical Bayes shrinks variances (Smyth 2004, doi:10.2202/1544-6115.1027), with Student's t;
repeats that agree better never widen an interval."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import NormalDist, fmean, median

from foretrain.base.records import Record
from foretrain.base.statistics import t_quantile
from foretrain.comparison.settings import Setting
from foretrain.comparison.subject import Subject

LEVEL = 0.99  # of the intervals; several questions are asked at once, and a false alarm costs more than a longer run
RUN_TO_RUN = 0.004  # of a card's step time: clocks, temperature, memory layout differ from start to start
RUN_TO_RUN_CPU = 0.02  # a CPU shares its cores, caches and memory with everything else
SEED_TO_SEED = 0.004  # of a loss: weights, order of the data
POINTS = 240  # a longer series is first reduced to as many medians or means of neighbours
RESAMPLES = 200
FEWEST_VALUES = 5  # values below which a series says nothing of its own noise
LEAST_FREEDOM = 3.0  # degrees of freedom; a bootstrap of so few blocks knows no better what fewer would mean
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Interval(Record):
    """A relative difference and its 99% interval. `count`: values of the shorter series; `beyond`: it excludes zero."""

    share: float
    low: float
    high: float
    count: int

    @property
    def beyond(self) -> bool:
        return self.low > 0 or self.high < 0


def reduced(values: Sequence[float], middle: Callable[[Sequence[float]], float], most: int = POINTS) -> list[float]:
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [middle(values[a:b]) for a, b in pairwise(edges)]


def block_length(values: Sequence[float]) -> int:
    """Return three times the integrated autocorrelation, at least the cube root of the count, at most a fifth of it."""
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
    """Return (middle, its standard error (NaN: few values), degrees of freedom) by circular moving-block bootstrap."""
    centre = middle(values)
    if len(values) < FEWEST_VALUES:
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
    """Return how much longer the steps of `other_s` take. `run_to_run`: the deviation between starts, as a share."""
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
    """Return paired differences of two losses as a share of `level`. `floor`: the deviation that no series shows."""
    mean, error, df = bootstrap(differences, fmean)
    half = _half(0.0 if math.isnan(error) else error / level, df, 0.0, 0.0, floor)
    share = mean / level
    return Interval(share=share, low=share - half, high=share + half, count=len(differences))


def _half(error_a: float, df_a: float, error_b: float, df_b: float, floor: float) -> float:
    """Return half of the interval: Welch's degrees of freedom for what was measured, the normal for the floor."""
    error = math.hypot(error_a, error_b)
    parts = sum(e**4 / df for e, df in ((error_a, df_a), (error_b, df_b)) if e and df)
    df = error**4 / parts if parts else math.inf
    t = _Z if math.isinf(df) else t_quantile((1 + LEVEL) / 2, max(LEAST_FREEDOM, df))
    return math.hypot(t * error, _Z * floor)


# A card slows as it warms up, so the whole of a long run does not compare with a short one. Time since the start of the
# process counts, not steps: it warms a card.

UNLIKE = 1.25  # runs whose lengths differ by less are taken whole
LEAST = 10  # steady steps of each in the stretch, at least
# A card's step drifts by about 2% as it warms up; as a deviation, where the common part cannot be cut out of a run.
WARM_UP = 0.01


@dataclass(frozen=True)
class Stretch:
    """Steady steps of each run. `seconds_s`: the common part; None where all is compared. `floor`: of too few steps."""

    times_s: tuple[tuple[float, ...], ...]
    seconds_s: float | None = None
    floor: float = 0.0

    def slower(self, number: int, all_s: float) -> float:
        return median(self.times_s[number]) / all_s if self.seconds_s is not None else 1.0


def shared(subjects: Sequence[Subject]) -> Stretch:
    """Return the common part of measured runs; everything where the steps of the times are unknown."""
    whole = Stretch(tuple(subject.step_times_s for subject in subjects))
    if not all(subject.step_times_s and subject.steps_since_start for subject in subjects):
        return whole
    lengths = [max(each.steps_since_start) * median(each.step_times_s) for each in subjects]
    end_s = min(lengths)
    if max(lengths) <= UNLIKE * end_s:
        return whole
    cut = Stretch(tuple(_until(subject, end_s) for subject in subjects), end_s)
    if min(map(len, cut.times_s)) < min(LEAST, *map(len, whole.times_s)):
        return Stretch(whole.times_s, floor=WARM_UP)
    return cut


def _until(subject: Subject, end_s: float) -> tuple[float, ...]:
    step_s = median(subject.step_times_s)
    pairs = zip(subject.steps_since_start, subject.step_times_s, strict=True)
    return tuple(time_s for since, time_s in pairs if since * step_s <= end_s * (1 + 1e-9))


ASSUMED_AS = 4
FEWEST_DEGREES = 2  # degrees of freedom: three runs of the same settings, or two pairs


class Scatter(Record):
    """Scatter between starts on one device, as shares of a step. `seen`: of the repeats; `counted`: for intervals."""

    device: str
    runs: tuple[tuple[str, ...], ...]
    assumed: float
    seen: float
    counted: float


def assumed(subject: Subject) -> float:
    return RUN_TO_RUN_CPU if subject.gpu and subject.gpu.kind == "cpu" else RUN_TO_RUN


def are_repeats(found: Sequence[Setting], subjects: Sequence[Subject], one: int, other: int) -> bool:
    a, b = subjects[one], subjects[other]
    known = a.measured and b.measured and None not in (a.config, b.config, a.gpu, b.gpu)
    return known and a.gpu == b.gpu and not any(
        "speed" in s.affects and (s.differs_between(one, other) or s.unknown_between(one, other)) for s in found
    )  # fmt: skip


def learned(subjects: Sequence[Subject], found: Sequence[Setting]) -> tuple[list[Subject], tuple[Scatter, ...]]:
    by_device: dict[str, list[list[Subject]]] = defaultdict(list)
    for group in _groups(subjects, found):
        by_device[_device(group[0])].append(group)
    scatters = {name: scatter for name, groups in by_device.items() if (scatter := _scatter(name, groups))}
    with_repeats = [
        replace(s, start_scatter=scatters[_device(s)].counted) if s.measured and _device(s) in scatters else s
        for s in subjects
    ]
    return with_repeats, tuple(scatters.values())


def _device(subject: Subject) -> str:
    return subject.gpu.name if subject.gpu else ""


def _groups(subjects: Sequence[Subject], found: Sequence[Setting]) -> list[list[Subject]]:
    groups: list[list[int]] = []
    for number in range(len(subjects)):
        mine = next((group for group in groups if are_repeats(found, subjects, group[0], number)), None)
        if mine is None:
            groups.append([number])
        else:
            mine.append(number)
    return [[subjects[n] for n in group] for group in groups if len(group) > 1]


def _scatter(device: str, groups: Sequence[Sequence[Subject]]) -> Scatter | None:
    squares, df = 0.0, 0
    for group in groups:
        stretch = shared(group)
        logs = [[math.log(time_s) for time_s in times] for times in stretch.times_s]
        middles, mean = [median(values) for values in logs], fmean(median(values) for values in logs)
        errors = [error for values in logs if not math.isnan(error := bootstrap(values)[1])]
        within = fmean(error**2 for error in errors) if errors else 0.0
        free = len(group) - 1
        squares += max(0.0, sum((middle - mean) ** 2 for middle in middles) - free * within)
        df += free
    if df < FEWEST_DEGREES:
        return None
    floor = assumed(groups[0][0])
    seen = math.sqrt(squares / df)
    every = ASSUMED_AS + df
    tail = (1 + LEVEL) / 2
    counted = math.sqrt((ASSUMED_AS * floor**2 + squares) / every)
    t = t_quantile(tail, max(LEAST_FREEDOM, every))
    counted *= t / NormalDist().inv_cdf(tail)  # intervals multiply it by the normal's quantile
    labels = tuple(tuple(subject.label for subject in group) for group in groups)
    counted = min(counted, floor) if seen <= floor else counted
    return Scatter(device=device, runs=labels, assumed=floor, seen=seen, counted=counted)
