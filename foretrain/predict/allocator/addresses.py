"""Where a driver puts new segments. Standard library only.

Between free blocks of one size PyTorch takes that of the lowest address, so this decides which block a tensor gets, and
what is left of it.
"""

from typing import Protocol

FIRST_ADDRESS = 1 << 40
GRANULE_BYTES = 2 << 20  # of what a driver gives
CHUNK_BYTES = 32 << 20


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class Addresses(Protocol):
    """Gives each new segment its address."""

    def new(self, nbytes: int) -> int:
        """The start of fresh address space for so many bytes."""
        ...


class Rising:
    """Each segment behind the last one: on the card that computes nothing, and nearly so in a public snapshot of an
    unnamed card (NiuHuangxiaozi/assignment2-systems, forward_and_backward_memory_snapshot_100)."""

    def __init__(self) -> None:
        self._next = FIRST_ADDRESS

    def new(self, nbytes: int) -> int:
        """The start of fresh address space for so many bytes."""
        address = self._next
        self._next += _up(nbytes, GRANULE_BYTES)
        return address


class Falling:
    """As on an H100 under Linux: chunks of whole 32 MiB, each below the last one. What a segment leaves of its chunk
    goes to later ones that fit, the lowest first.

    In a public snapshot of an H100-class card (kkaitlyn111/cs336-a2-systems, memory_ctx128_fullstep_) 667 of 782 new
    segments begin such a chunk and 114 lie right behind another. What is freed is not given again here.
    """

    def __init__(self) -> None:
        self._lowest = FIRST_ADDRESS
        self._left: list[tuple[int, int]] = []  # of chunks: (address, bytes)

    def new(self, nbytes: int) -> int:
        """The start of fresh address space for so many bytes."""
        nbytes = _up(nbytes, GRANULE_BYTES)
        fitting = [(address, left) for address, left in self._left if left >= nbytes]
        if fitting:
            address, left = min(fitting)
            self._left.remove((address, left))
        else:
            left = _up(nbytes, CHUNK_BYTES)
            self._lowest -= left
            address = self._lowest
        if left > nbytes:
            self._left.append((address + nbytes, left - nbytes))
        return address
