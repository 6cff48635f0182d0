"""Whether a run whose numbers all stayed finite has diverged: its loss on the training split says so.

Training text alone is looked at: on validation text the loss of a model that overfits rises too. Nothing is stopped for
it in the middle of a run, as losses recover; a run that ends so did not finish well.
"""

import math
from collections.abc import Sequence
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
