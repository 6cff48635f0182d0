"""Step times of two runs over the stretch that both have been through.

A card slows as it warms up, so the whole of a long run is no match for a short one. Time since the start counts, not
the number of steps: it is what warms a card, and a resumed run starts anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from foretrain.comparison.subject import Subject

UNLIKE = 1.25  # runs whose lengths differ by less are taken whole
LEAST = 10  # steady steps of each in the stretch, at least
# A card's step drifts by about 2 % as it warms up; as a deviation, where the stretch cannot be cut out of a run.
WARM_UP = 0.01


@dataclass(frozen=True)
class Stretch:
    """Steady steps of each run, in their order. `seconds_s`: how long the stretch is; None where all is compared.

    `floor`: the deviation that comes on top where runs of unlike lengths have too few steps in common.
    """

    times_s: tuple[tuple[float, ...], ...]
    seconds_s: float | None = None
    floor: float = 0.0

    def slower(self, number: int, all_s: float) -> float:
        """How many times as long as `all_s` a step of this stretch takes."""
        return median(self.times_s[number]) / all_s if self.seconds_s is not None else 1.0


def shared(subjects: Sequence[Subject]) -> Stretch:
    """The stretch of measured runs. Where nobody says which step a time is of, everything."""
    whole = Stretch(tuple(subject.step_times_s for subject in subjects))
    if not all(subject.step_times_s and subject.steps_since_start for subject in subjects):
        return whole
    lengths = [_length_s(subject) for subject in subjects]
    end_s = min(lengths)
    if max(lengths) <= UNLIKE * end_s:
        return whole
    cut = Stretch(tuple(_until(subject, end_s) for subject in subjects), end_s)
    if min(map(len, cut.times_s)) < min(LEAST, *map(len, whole.times_s)):
        return Stretch(whole.times_s, floor=WARM_UP)
    return cut


def _length_s(subject: Subject) -> float:
    return max(subject.steps_since_start) * median(subject.step_times_s)


def _until(subject: Subject, end_s: float) -> tuple[float, ...]:
    step_s = median(subject.step_times_s)
    pairs = zip(subject.steps_since_start, subject.step_times_s, strict=True)
    return tuple(time_s for since, time_s in pairs if since * step_s <= end_s * (1 + 1e-9))
