"""The kernels that a pass runs, what each reads and writes: noted in the pass's recorder. No torch."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from foretrain.predict.abstract.dims import factors


class Kernel(NamedTuple):
    """One launch, or several alike. `item_bytes`: of what it computes with; `shape`: (m, n, k) of a matmul,
    (B, H, T, D) of attention, else empty; `reads`, `writes`: bytes of an element and shape of each tensor."""

    layer: int
    name: str
    kind: str
    part: str
    item_bytes: int
    shape: tuple[int, ...]
    reads: tuple[tuple[int, tuple[int, ...]], ...]
    writes: tuple[tuple[int, tuple[int, ...]], ...]
    read_ids: tuple[int, ...] = ()  # which tensors these are: the serial of a birth, else a negative number
    write_ids: tuple[int, ...] = ()
    times: int = 1  # that it is launched, with other parts of the same tensors

    def in_letters(self) -> "Launch":
        shape = tuple(factors(1, (size,), False) for size in self.shape)
        if not shape:
            shape = (factors(1, max((each for _, each in self.reads + self.writes), key=_elements), False),)
        reads, writes = (tuple(factors(*tensor, False) for tensor in tensors) for tensors in (self.reads, self.writes))
        return Launch(self.name, self.kind, self.part, self.item_bytes, shape, reads, writes)


def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(map(int, shape))


class Launch(NamedTuple):
    """A kernel for any sizes: its shape (elements, where it is neither of the two) and its bytes as (coefficient,
    letters …)."""

    name: str
    kind: Any  # speed/ops.py, Kind
    part: Any  # and Part
    item_bytes: int
    shape: tuple[Any, ...]
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]


Launches = dict[Launch, Counter[int]]  # with how often each runs in each layer


def counted(kernels: Iterable[Kernel]) -> Launches:
    found: Launches = {}
    known: dict[Any, Counter[int]] = {}
    for kernel in kernels:
        tensors = (*kernel.reads, *kernel.writes, (1, kernel.shape))
        # Equal sizes can have different letters.
        key = kernel[1:8], tuple([getattr(d, "letters", None) for _, shape in tensors for d in shape])
        layers = known.get(key)
        if layers is None:
            layers = known[key] = found.setdefault(kernel.in_letters(), Counter())
        layers[kernel.layer] += 1
    return found
