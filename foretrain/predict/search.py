"""Where what fits ends, found by growing strides and halves."""

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
    rises, near, stride = fits(guess), guess, max(1, guess // 8)
    while near != (far := min(top, near + stride) if rises else max(1, near - stride)):
        if fits(far) != rises:
            return bisect(fits, *sorted((near, far)))
        near, stride = far, stride * 2
    return top if rises else 0
