"""Where what fits ends, found by halving."""

from collections.abc import Callable

Fits = Callable[[int], bool]


def bisect(fits: Fits, low: int, high: int) -> int:
    """Return the largest number that fits, where `low` does and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search_outwards(fits: Fits, guess: int, top: int) -> int:
    """Return the largest number that fits, 0 where not even 1 does: by growing strides from the guess, then halves."""
    if fits(guess):
        low, stride = guess, max(1, guess // 8)
        while low < top:
            high = min(top, low + stride)
            if not fits(high):
                return bisect(fits, low, high)
            low, stride = high, stride * 2
        return top
    high, stride = guess, max(1, guess // 8)
    while high > 1:
        low = max(1, high - stride)
        if fits(low):
            return bisect(fits, low, high)
        high, stride = low, stride * 2
    return 0
