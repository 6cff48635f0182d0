"""What a device reaches in practice: the best of every kind of work that a training step is made of, measured.

A peak is the best of all shapes of its kind, so no step is quicker than its work at these peaks. `foretrain calibrate`
measures them (tuning/peaks.py); predict/speed/limit.py makes the limit of a step of them.
"""

import math
from itertools import pairwise
from typing import Literal

from foretrain.base.records import Record

# The three matmuls of a linear layer differ in their layout alone, so the best of them is a limit for each.
ProductKind = Literal["matmul", "matmul_input", "matmul_weight", "attention"]
Access = Literal["copy", "read", "write", "in_place"]


class ProductPeak(Record):
    """The best rate of one kind of product in one dtype, and at which shape: (m, n, k), batched ones with their count
    first; (B, H, T, D) of an attention kernel, whose causal half counts."""

    kind: ProductKind
    dtype: str
    shape: tuple[int, ...]
    flop_per_s: float


class Bandwidth(Record):
    """Bytes read and written a second by a kernel that moves `moved_bytes`: what is small stays in a cache."""

    access: Access
    moved_bytes: int
    bytes_per_s: float


class Peaks(Record):
    """All of it. `page_s`: what the system takes to hand out a fresh page of `page_bytes` at its first touch, on a CPU.
    `launch_s`: the smallest operation; `autograd_launch_s`: with gradients, its backward pass included."""

    products: tuple[ProductPeak, ...]
    bandwidths: tuple[Bandwidth, ...]
    launch_s: float
    autograd_launch_s: float
    page_s: float | None = None
    page_bytes: int | None = None
    took_s: float = 0.0

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of which products were measured."""
        return list(dict.fromkeys(each.dtype for each in self.products if each.kind != "attention"))

    def best(self, dtype: str, *kinds: ProductKind) -> ProductPeak | None:
        """The best product of these kinds in a dtype."""
        found = [each for each in self.products if each.dtype == dtype and each.kind in kinds]
        return max(found, key=lambda each: each.flop_per_s, default=None)

    def flop_per_s(self, dtype: str, *, attention: bool = False) -> float | None:
        """The peak of matmuls in a dtype, or of what attention is made of; None where none was measured."""
        found = self.best(dtype, "attention") if attention else None
        found = found or self.best(dtype, "matmul", "matmul_input", "matmul_weight")
        return found.flop_per_s if found else None

    def bytes_per_s(self, moved_bytes: float, *, in_place: bool = False) -> float | None:
        """The bandwidth for a kernel that moves so many bytes: log-linear between the sizes that were measured, and no
        less than of any larger one. `in_place`: what writes where it read needs half the room in a cache."""
        best: dict[int, float] = {}
        for each in self.bandwidths:
            if (each.access == "in_place") == in_place:
                best[each.moved_bytes] = max(each.bytes_per_s, best.get(each.moved_bytes, 0.0))
        if not best:
            return self.bytes_per_s(moved_bytes) if in_place else None
        points = list[tuple[int, float]]()
        for size in sorted(best, reverse=True):
            points.append((size, max(best[size], points[-1][1] if points else 0.0)))
        points.reverse()
        return _between(points, moved_bytes)

    def cache_bytes_per_s(self, *, in_place: bool = False) -> float | None:
        """The best bandwidth of all sizes."""
        return self.bytes_per_s(0, in_place=in_place)

    def memory_bytes_per_s(self, *, in_place: bool = False) -> float | None:
        """The bandwidth of what is too large for any cache that was met."""
        return self.bytes_per_s(math.inf, in_place=in_place)


def _between(points: list[tuple[int, float]], size: float) -> float:
    if size <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if size < high:
            share = math.log(size / low) / math.log(high / low)
            return low_rate ** (1 - share) * high_rate**share
    return points[-1][1]


def best_of(*several: Peaks) -> Peaks:
    """The better of every figure: what else a machine does can only slow a measurement down."""
    products: dict[tuple[str, str], ProductPeak] = {}
    for each in (each for peaks in several for each in peaks.products):
        key = each.kind, each.dtype
        if key not in products or each.flop_per_s > products[key].flop_per_s:
            products[key] = each
    moved: dict[tuple[str, int], Bandwidth] = {}
    for rate in (rate for peaks in several for rate in peaks.bandwidths):
        at = rate.access, rate.moved_bytes
        if at not in moved or rate.bytes_per_s > moved[at].bytes_per_s:
            moved[at] = rate
    pages = [peaks for peaks in several if peaks.page_s is not None]
    page = min(pages, key=lambda peaks: peaks.page_s or 0.0) if pages else several[0]
    return Peaks(
        products=tuple(products.values()), bandwidths=tuple(moved.values()),
        launch_s=min(peaks.launch_s for peaks in several),
        autograd_launch_s=min(peaks.autograd_launch_s for peaks in several),
        page_s=page.page_s, page_bytes=page.page_bytes, took_s=sum(peaks.took_s for peaks in several),
    )  # fmt: skip
