"""Which ranks of a run are slower than the others, so that all wait for them. No torch."""

from collections.abc import Sequence
from statistics import median_low

from foretrain.training.store import RankFigures

SLOW = 0.15  # slower than the median by more
LEAST_S = 0.2  # of an evaluation that says something


def slow(figures: Sequence[RankFigures]) -> list[tuple[RankFigures, float]]:
    """The ranks that compute so much slower than the median that all wait for them, and by which share."""
    times = {f.rank: f.evaluated_s / f.evaluated_tokens for f in figures if f.evaluated_tokens}
    if not times or max(f.evaluated_s for f in figures) < LEAST_S:
        return []
    usual = median_low(times.values())
    behind = [(f, times[f.rank] / usual - 1) for f in figures if f.rank in times]
    return [(f, share) for f, share in behind if share > SLOW]
