"""Losses that leap: told, never acted on.

A loss is held against the steps before it by their median and by the spread around it (the median distance, which for
a normal distribution is 1 / 1.4826 of a standard deviation), so that neither a leap nor the slope of a young run makes
the next leap look small. The losses are part of a checkpoint, so a resumed run tells what the whole one would have.
"""

from statistics import median

WINDOW, FEWEST = 100, 30  # steps
LEAST_SCORE = 8.0  # standard deviations; a run of a million steps with normal noise has none beyond 5
_NORMAL = 1.4826
_SMALLEST = 1e-3  # of the median: the spread of a loss that hardly moves says nothing


def score(recent: tuple[float, ...], loss: float) -> float | None:
    """By how many standard deviations a loss lies above the recent ones; None where there are too few of them."""
    if len(recent) < FEWEST:
        return None
    middle = median(recent)
    spread = max(_NORMAL * median(abs(x - middle) for x in recent), _SMALLEST * abs(middle), 1e-9)
    return (loss - middle) / spread


def with_loss(recent: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """The recent losses with one more, the oldest left out where there are enough."""
    return (*recent[-(WINDOW - 1) :], loss)
