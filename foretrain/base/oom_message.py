"""What PyTorch's own out-of-memory message says, as numbers.

The sentences are those of c10/cuda/CUDACachingAllocator.cpp (malloc: "Tried to allocate … GPU … has a total capacity of
… of which … is free. … this process has … memory in use. … allowed; Of the allocated memory … is allocated by PyTorch,
and … is reserved by PyTorch but unallocated") and c10/core/impl/alloc_cpu.cpp ("you tried to allocate … bytes"). Sizes
are printed with two decimals, so they are as exact as that.
"""

import re

from foretrain.base.records import Record
from foretrain.base.units import BYTE_UNITS

_SIZE = r"(\d{1,20}(?:\.\d{1,6})?) ?(bytes|[KMGT]iB)"
_SAYS = {
    "asked_bytes": rf"[Tt]ried to allocate {_SIZE}",
    "card_bytes": rf"total capacity (?:of )?{_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "allowed_bytes": rf"{_SIZE} allowed",
    "allocated_bytes": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
    "unused_bytes": rf"and {_SIZE} is reserved by PyTorch but unallocated",
}
_OTHERS = re.compile(rf"Process \d{{1,10}} has {_SIZE} memory in use")
_IS_ONE = re.compile(
    r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|DefaultCPUAllocator: (?:can't|not enough)"
    r"|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED"
)
MAX_CHARS = 20_000


class OutOfMemoryMessage(Record):
    """The figures of one message; None where it does not say. `unused_bytes`: reserved but not allocated."""

    asked_bytes: int | None = None
    card_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    used_by_others_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    unused_bytes: int | None = None


def parse(text: str) -> OutOfMemoryMessage | None:
    """The last such message in a text; None where there is none."""
    text = text[-MAX_CHARS:]
    starts = [match.start() for match in _IS_ONE.finditer(text)]
    if not starts:
        return None
    # A traceback's last line names the class and then says the sentence; both are one message.
    begin = next((s for s in reversed(starts) if _found(_SAYS["asked_bytes"], text[s:]) is not None), starts[-1])
    text = text[begin:]
    values = {name: _found(pattern, text) for name, pattern in _SAYS.items()}
    others = [_bytes(*match.groups()) for match in _OTHERS.finditer(text)]
    return OutOfMemoryMessage(**values, used_by_others_bytes=sum(others) if others else None)


def _found(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return _bytes(*match.groups()) if match else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * BYTE_UNITS[unit.lower()])
