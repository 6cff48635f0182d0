"""What Inductor takes to find out whether a matmul is faster with padded sides. No torch.

Where a side is not a multiple of 4 (fp32) or 8 (half precision), it times both ways on matrices of its own while the
step compiles: before a graph runs, for the first time, so beside little else. Both operands, their padded copies, a
result, and a buffer as large as the card's cache (torch/_inductor/fx_passes/pad_mm.py, _should_pad; benchmarking.py,
benchmark_gpu). It leaves out matmuls that the card's bandwidth bounds; which these are it asks the driver, so here, as
in a trace, all are timed.
"""

from collections.abc import Iterable
from typing import NamedTuple

from foretrain.predict.timeline import Timeline

ALIGNED = {4: 4, 2: 8}  # elements, by their bytes


class Product(NamedTuple):
    """m x k times k x n, so often at once."""

    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def backward(self) -> tuple["Product", "Product"]:
        """The products that make the gradients of its operands."""
        m, k, n, batch = self
        return Product(m, n, k, batch), Product(k, m, n, batch)


def is_unaligned(product: Product, width: int) -> bool:
    """Whether a side is not a multiple of what the card's units take at once. `width`: bytes of an element."""
    return any(side % ALIGNED[width] and side > 1 for side in product[:3])


def time_padding(t: Timeline, products: Iterable[Product], width: int) -> None:
    """Write into a timeline what timing takes, once for each product with an unaligned side. `width`: bytes of an
    element."""
    for product in dict.fromkeys(products):
        if is_unaligned(product, width):
            _time(t, product, width)


def _time(t: Timeline, product: Product, width: int) -> None:
    m, k, n, batch = product
    wider_m, wider_k, wider_n = (
        side if side == 1 else -(-side // ALIGNED[width]) * ALIGNED[width] for side in (m, k, n)
    )
    take = lambda rows, columns: t.alloc("workspace", t.size(width * batch * rows * columns))  # noqa: E731
    held = [take(m, k), take(k, n)]
    held += [take(wider_m, wider_k)] if (m, k) != (wider_m, wider_k) else []
    held += [take(wider_k, wider_n)] if (k, n) != (wider_k, wider_n) else []
    for rows, columns in ((m, n), (wider_m, wider_n)):
        t.free(take(rows, columns))
        cache = t.alloc("measuring", t.size(1, "L2"))
        t.free(take(rows, columns), cache)
    t.free(*held)
