"""Sizes of dimensions that remember their letters, so that a tensor's bytes have a formula. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Dim(int):
    """A number that is `coefficient` times a product of letters: Dim(3072, 4, ("C",)) is 4·C."""

    coefficient: int | float  # a half, of D
    letters: tuple[str, ...]

    def __new__(cls, value: int, coefficient: int | float = 1, letters: tuple[str, ...] = ()) -> "Dim":
        made = super().__new__(cls, value)
        made.coefficient = int(coefficient) if coefficient % 1 == 0 else coefficient
        made.letters = letters
        return made

    def __mul__(self, other: int) -> int:
        if isinstance(other, Dim):
            return Dim(int(self) * int(other), self.coefficient * other.coefficient, self.letters + other.letters)
        if isinstance(other, int):
            return Dim(int(self) * other, self.coefficient * other, self.letters)
        return NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        value = int(self) // int(other)
        if self.letters == ("C",) and isinstance(other, Dim) and other.letters == ("H",):
            whole = self.coefficient % other.coefficient == 0
            return Dim(value, self.coefficient // other.coefficient, ("D",)) if whole else value
        if self.letters == ("H",) and isinstance(other, Dim) and other.letters == ("K",):
            return Dim(value, 1, ("G",))
        if not isinstance(other, Dim) and isinstance(other, int) and self.coefficient % other == 0:
            return Dim(value, self.coefficient // other, self.letters)
        if self.letters == ("D",) and other == 2 and self % 2 == 0:  # rotary positions turn one half against the other
            return Dim(value, self.coefficient / 2, self.letters)
        return value


def factors(item_bytes: int, shape: Sequence[int], together: bool = True) -> tuple[Any, ...]:
    """Return (coefficient, letters …) of a tensor's bytes: (8, "B", "T", "C"); C: heads `together`, A: padded."""
    coefficient: int | float = item_bytes
    letters: list[str] = []
    for size in shape:
        if isinstance(size, Dim):
            coefficient *= size.coefficient
            for letter in size.letters:
                pair = (letters[-1] if letters else "", letter)
                if pair in WHOLE and (together or WHOLE[pair] != "C"):
                    letters[-1] = WHOLE[pair]
                else:
                    letters.append(letter)
        else:
            coefficient *= size
    return (int(coefficient) if coefficient % 1 == 0 else coefficient, *letters)


# Heads and a head's width -> the width of all; heads of keys and the size of their groups -> all heads.
WHOLE = {("H", "D"): "C", ("H", "E"): "A", ("K", "G"): "H"}


class Kernel(NamedTuple):
    """One launch or several. `shape`: (m, n, k) of a matmul, (B, H, T, D) of attention; bytes are of each tensor."""

    layer: int
    name: str
    kind: str
    part: str
    item_bytes: int
    shape: tuple[int, ...]
    reads: tuple[tuple[int, tuple[int, ...]], ...]
    writes: tuple[tuple[int, tuple[int, ...]], ...]
    read_ids: tuple[int, ...] = ()  # which tensors these are: an allocation's serial, else a negative number
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
    """A kernel for any sizes: its shape (else elements) and its bytes as (coefficient, letters …)."""

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
