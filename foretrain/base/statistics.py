"""Student's t, and fewer points of a long curve."""

import math
import statistics
from collections.abc import Sequence


def extremes(values: Sequence[float], most: int) -> list[int]:
    """Return rising indices of at most `most` values (4 at least): the first, the last, and extremes of equal parts."""
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


def t_quantile(p: float, dof: float) -> float:
    """Return Student's t at which a share p (above one half) lies below; G. W. Hill 1970, CACM algorithm 396."""
    tail = 2 * (1 - p)
    if dof == 1:
        return 1 / math.tan(tail * math.pi / 2)
    if dof == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (dof - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * dof
    y = (d * tail) ** (2 / dof)
    if y > 0.05 + a:
        x = statistics.NormalDist().inv_cdf(tail / 2)
        y = x * x
        if dof < 5:
            c += 0.3 * (dof - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((dof + 6) / (dof * y) - 0.089 * d - 0.822) * (dof + 2) * 3) + 0.5 / (dof + 4)) * y - 1) * (
            dof + 1
        ) / (dof + 2) + 1 / y
    return math.sqrt(dof * y)
