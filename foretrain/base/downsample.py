"""Fewer points of a curve, without losing what the eye looks for: first, last, and the extremes between them."""

from collections.abc import Sequence


def extremes(values: Sequence[float], most: int) -> list[int]:
    """Indices, rising, of at most `most` values (4 at least): the first, the last, and of each of equal stretches the
    lowest and the highest. All of them where there are no more."""
    count = len(values)
    if count <= max(4, most):
        return list(range(count))
    stretches = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)
