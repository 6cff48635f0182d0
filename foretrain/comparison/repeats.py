"""How far the speed of one run is from that of the same run started again, learned where such repeats are given.

Repeats are runs on one device in which no setting differs that could change the speed. What is left of their distance
after the noise within each is the scatter between starts. Few repeats tell little of a deviation, so the assumption
(noise.py) counts as ASSUMED_AS further degrees of freedom, the way empirical Bayes shrinks variances (Smyth 2004,
doi:10.2202/1544-6115.1027), with Student's t; repeats that agree better than assumed never widen an interval.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, median

from foretrain.base.records import Record
from foretrain.base.student import t_quantile
from foretrain.comparison.noise import LEAST_FREEDOM, LEVEL, RUN_TO_RUN, RUN_TO_RUN_CPU, bootstrap
from foretrain.comparison.overlap import shared
from foretrain.comparison.settings import Setting
from foretrain.comparison.subject import Subject

ASSUMED_AS = 4
FEWEST = 2  # degrees of freedom: three runs of the same settings, or two pairs


class Scatter(Record):
    """From start to start on one device, as shares of a step. `runs`: labels of the repeats, by settings.

    `assumed`: without repeats; `seen`: of the repeats, as a standard deviation; `counted`: what intervals are made of.
    """

    device: str
    runs: tuple[tuple[str, ...], ...]
    assumed: float
    seen: float
    counted: float


def assumed(subject: Subject) -> float:
    """The deviation between starts where no repeats tell."""
    return RUN_TO_RUN_CPU if subject.gpu and subject.gpu.kind == "cpu" else RUN_TO_RUN


def are_repeats(found: Sequence[Setting], subjects: Sequence[Subject], one: int, other: int) -> bool:
    """Whether two runs are known to be of the same speed but for noise."""
    a, b = subjects[one], subjects[other]
    known = a.measured and b.measured and None not in (a.config, b.config, a.gpu, b.gpu)
    return known and a.gpu == b.gpu and not any(
        "speed" in s.affects and (s.differs_between(one, other) or s.unknown_between(one, other)) for s in found
    )  # fmt: skip


def learned(subjects: Sequence[Subject], found: Sequence[Setting]) -> tuple[list[Subject], tuple[Scatter, ...]]:
    """The subjects with the scatter of their device, and what was learned, by device."""
    by_device: dict[str, list[list[Subject]]] = defaultdict(list)
    for group in _groups(subjects, found):
        by_device[_device(group[0])].append(group)
    scatters = {name: scatter for name, groups in by_device.items() if (scatter := _scatter(name, groups))}
    told = [
        replace(s, start_scatter=scatters[_device(s)].counted) if s.measured and _device(s) in scatters else s
        for s in subjects
    ]  # fmt: skip
    return told, tuple(scatters.values())


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
    if df < FEWEST:
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
