"""Losses that show that a run goes wrong although all its numbers stayed finite.

It has diverged: training text alone is looked at, as on validation text the loss of a model that overfits rises too.
Nothing is stopped for it in the middle of a run, as losses recover; a run that ends so did not finish well.

It leaps, which is told and never acted on. A loss is compared with the steps before it by their median and by the
spread around it (the median distance, which for a normal distribution is 1 / 1.4826 of a standard deviation), so that
neither a leap nor the slope of a young run makes the next leap look small. The losses are part of a checkpoint, so a
resumed run tells what the whole one would have.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

FAR_ABOVE = 1.5  # times the loss of a model that knows nothing: worse than that is no chance
LEAST_GAIN, MOST_LOST = 0.5, 0.5  # nats that were gained at all, and the share of them that is lost again


def knows_nothing(losses: Sequence[float], vocab_size: int) -> float:
    """The loss of a guess among all tokens, or that of the run's start where it is higher."""
    return max(math.log(vocab_size), losses[0])


def diverging(losses: Sequence[float], vocab_size: int) -> bool:
    """Whether the last of these training losses is far above that of a model that knows nothing."""
    return losses[-1] > FAR_ABOVE * knows_nothing(losses, vocab_size)


def at_the_end(losses: Sequence[float], vocab_size: int) -> tuple[str, dict[str, Any]] | None:
    """(id of the error, its values) of a run that ends with the last of these training losses; None: it went well."""
    if len(losses) < 2:
        return None
    first, best, last = losses[0], min(losses), losses[-1]
    if diverging(losses, vocab_size):
        return "diverged.worse", {"loss": last, "start": knows_nothing(losses, vocab_size)}
    if first - best >= LEAST_GAIN and last - best > MOST_LOST * (first - best):
        return "diverged.lost", {"loss": last, "best": best, "start": first}
    return None


WINDOW, FEWEST = 100, 30  # steps
LEAST_SCORE = 8.0  # standard deviations; a run of a million steps with normal noise has none beyond 5
_NORMAL = 1.4826
_SMALLEST = 1e-3  # of the median: the spread of a loss that hardly moves says nothing


def spike_score(recent: tuple[float, ...], loss: float) -> float | None:
    """By how many standard deviations a loss lies above the recent ones; None where there are too few of them."""
    if len(recent) < FEWEST:
        return None
    middle = median(recent)
    spread = max(_NORMAL * median(abs(x - middle) for x in recent), _SMALLEST * abs(middle), 1e-9)
    return (loss - middle) / spread


def with_loss(recent: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """The recent losses with one more, the oldest left out where there are enough."""
    return (*recent[-(WINDOW - 1) :], loss)
