"""Which of some settings is the fastest, told from noisy times: paired rounds, bounds, successive elimination.

In a round every setting that is still in the race is timed once, so that what drifts (clocks, other programs, heat)
is in all of them and goes out of their differences. Differences are of logarithms. Their mean is trimmed, as a round
may be hit by something else, and its bounds are those of Yuen and Tukey: Student's t on the winsorized deviation
(Tukey and McLaughlin 1963, Sankhya A 25, 331). No torch, no numpy, no clock.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.base.student import t_quantile

NEAR = 0.01  # settings that differ by less are as good as each other
CONFIDENCE = 0.95  # of all bounds of a race together: its settings, and its looks
LOOKS = (3, 4, 6, 8, 12, 16, 24)  # rounds after which something is decided; each look more would be a chance to err
TRIM = 0.2  # of the rounds, at each end
FINEST = 0.002  # no two rounds agree better than by chance


@dataclass(frozen=True)
class Estimate:
    """A mean of logarithms and the half width of its bounds; infinite where there is too little to tell."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The trimmed mean of some values, and its two-sided bounds."""
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
    """Settings by number, their rounds, and who is still in it."""

    def __init__(self, entrants: Sequence[int], near: float = NEAR) -> None:
        self.alive, self.near = list(entrants), near
        self.rounds: list[dict[int, float]] = []  # log seconds of each that was timed
        self.dropped: dict[int, int] = {}  # who fell out, and in which round

    def add(self, seconds: dict[int, float]) -> None:
        """One round's times; who is not in it has died and is out."""
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
        """Whether this is a round after which something is decided."""
        return len(self.rounds) in LOOKS

    @property
    def level(self) -> float:
        """The confidence of one bound, so that those of all pairs hold together at all looks (Bonferroni)."""
        pairs = len(self.alive) * (len(self.alive) - 1) / 2
        return 1 - (1 - CONFIDENCE) / (max(1.0, pairs) * len(LOOKS))

    @property
    def best(self) -> int:
        """The fastest one as far as is known, by differences from the middle of those that are in the race."""
        centred: dict[int, list[float]] = {number: [] for number in self.alive}
        for row in self.rounds:
            middle = statistics.fmean(row[number] for number in self.alive)
            for number in self.alive:
                centred[number].append(row[number] - middle)
        return min(self.alive, key=lambda number: estimate(centred[number]).mean)

    def against(self, number: int, other: int, confidence: float = CONFIDENCE) -> Estimate:
        """By how much a setting's steps are longer than another's, in logarithms, over the rounds that have both."""
        shared = [row[number] - row[other] for row in self.rounds if number in row and other in row]
        return estimate(shared, confidence) if shared else Estimate(math.nan, math.inf)

    @property
    def decided(self) -> bool:
        """Nobody who is left can be faster than the best by more than `near`."""
        if len(self.alive) < 2:
            return True
        if not self.looks:
            return False
        best, level = self.best, self.level
        return all(self.against(n, best, level).low >= -self.near for n in self.alive if n != best)
