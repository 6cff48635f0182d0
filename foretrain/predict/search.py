"""The largest count that fits."""

from collections.abc import Callable


def largest_count(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to `most` that fits, found by doubling and then by halving; 0 where not even 1 does.

    `fits` must say no to every count above one that does not fit.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
