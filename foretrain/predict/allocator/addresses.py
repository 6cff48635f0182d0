"""Which of two free blocks of one size comes first: by where a driver puts new segments. Standard library only.

It decides which block a tensor gets, and what is left of it. Up to a version (predict/software.py, reuses_oldest)
PyTorch takes the block of the lowest address. In public snapshots (2.5 to 2.11) addresses fall where they are those of
a Linux process (0x7f...), in four of four. They rise in two that have the addresses of WSL 2 (0x5... and 0x7... in the
range of github.com/microsoft/WSL/issues/40401); of Windows itself none was seen. From that version on PyTorch takes the
block of the oldest segment, wherever it lies; addresses that rise say the same.
"""

from heapq import heappop, heappush
from typing import Protocol

from foretrain.predict import software

FIRST_ADDRESS = 1 << 52  # below lies room for 2,048 stretches of expandable segments
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
    """Each segment behind the last one: in order of age. So they lie in a public snapshot of what seems to be WSL 2
    (NiuHuangxiaozi/assignment2-systems, forward_and_backward_memory_snapshot_100: 48 of 65, most others in gaps)."""

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
    segments begin such a chunk and 114 lie right behind another. Not modelled: on an H100 the first 13 to 16 segments
    filled 512 MiB upwards, and what is freed is not given again.
    """

    def __init__(self) -> None:
        self._lowest = FIRST_ADDRESS
        self._left: dict[int, list[int]] = {}  # of chunks: addresses by bytes, the lowest first

    def new(self, nbytes: int) -> int:
        """The start of fresh address space for so many bytes."""
        nbytes = _up(nbytes, GRANULE_BYTES)
        fitting = [(places[0], left) for left, places in self._left.items() if left >= nbytes and places]
        if fitting:
            address, left = min(fitting)
            heappop(self._left[left])
        else:
            left = _up(nbytes, CHUNK_BYTES)
            self._lowest -= left
            address = self._lowest
        if left > nbytes:
            heappush(self._left.setdefault(left - nbytes, []), address + nbytes)
        return address


def usual(reuses_oldest: bool | None = None) -> Addresses:
    """As a torch that does, or does not, orders segments under Linux; None: as the torch that plans are for."""
    oldest = software.of("").reuses_oldest if reuses_oldest is None else reuses_oldest
    return Rising() if oldest else Falling()
