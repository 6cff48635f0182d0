"""Read a program's out-of-memory message as numbers.

PyTorch since 2.1 (c10/cuda/CUDACachingAllocator.cpp; 2.1 writes "capacty"): "GPU … has a total capacity of … of which …
is free. Process … has … memory in use. Including non-PyTorch memory, this process has … memory in use. … allowed; Of
the allocated memory … is allocated by PyTorch, and … is reserved by PyTorch but unallocated". Up to 2.0 the figure
stands before its name: "… total capacity; … already allocated; … free; … allowed; … reserved in total by PyTorch", up
to 1.3 "… cached" for what is reserved but unallocated. Apple's (aten/src/ATen/mps/MPSAllocator.mm): "MPS allocated: …,
other allocations: …, max allowed: …", in binary units that older versions call GB. The host's: c10/core/impl/
alloc_cpu.cpp. llm.c and the CUDA runtime give no figures. Sizes have two decimals, so they are as exact as that.
"""

import re

from foretrain.base.records import Record
from foretrain.base.units import BYTE_UNITS

_SIZE = r"(\d{1,20}(?:\.\d{1,6})?) ?(bytes|[KMGT]i?B)"
_SAYS = {
    "asked_bytes": rf"[Tt]ried to allocate {_SIZE}",
    "card_bytes": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity",
    "free_bytes": rf"of which {_SIZE} is free|{_SIZE} free;",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "allowed_bytes": rf"{_SIZE} allowed|max allowed: {_SIZE}",
    "allocated_bytes": rf"allocated memory {_SIZE} is allocated by|{_SIZE} already allocated|MPS allocated: {_SIZE}",
    "unused_bytes": rf"and {_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached\)",
    "reserved_bytes": rf"{_SIZE} reserved in total by",
    "outside_bytes": rf"other allocations: {_SIZE}",
}
_PROCESSES = re.compile(rf"Process \d{{1,10}} has {_SIZE} memory in use")
_IS_ONE = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend|NPU) out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED: Out of memory"
    r"|(?:CUDA|HIP|driver|runtime) error\b[^\n]{0,200}?[:\n]\s*out of memory|CUDA ERROR\][^\n]{0,200}:\s*out of memory"
    r"|DefaultCPUAllocator: (?:can't|not enough)|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED"
)
MAX_CHARS = 20_000
_ROUNDING = 1.002  # of two figures with two decimals each
_ROUNDING_BYTES = 16 << 20  # of a difference of three figures in GiB


class OutOfMemoryMessage(Record):
    """The figures of one message; None where it does not give them.

    `unused_bytes`: reserved but not allocated; `outside_bytes`: in use besides what PyTorch reserved. `before_2_1`:
    PyTorch's wording up to 2.0. `program`: who prints it, where it is not PyTorch.
    """

    asked_bytes: int | None = None
    card_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    context_bytes: int | None = None
    used_by_others_bytes: int | None = None
    outside_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None
    before_2_1: bool = False
    program: str = ""

    def figures(self) -> dict[str, int]:
        return {name: value for name, value in self.model_dump().items() if type(value) is int}


def parse(text: str) -> OutOfMemoryMessage | None:
    text = text[-MAX_CHARS:]
    starts = [match.start() for match in _IS_ONE.finditer(text)]
    if not starts:
        return None
    # A traceback's last line names the class and then the sentence; both are one message.
    begin = next((s for s in reversed(starts) if _find(_SAYS["asked_bytes"], text[s:]) is not None), starts[-1])
    text = text[begin:]
    found = {name: _find(pattern, text) for name, pattern in _SAYS.items()}
    if "MPS backend" in text[:40] and None not in (found["allowed_bytes"], found["allocated_bytes"]):
        held = (found["allocated_bytes"] or 0) + (found["outside_bytes"] or 0)
        found["free_bytes"] = max(0, (found["allowed_bytes"] or 0) - held)
    processes = [_bytes(*match.groups()) for match in _PROCESSES.finditer(text)]
    program = "llm.c" if text.startswith("CUDA ERROR]") else "JAX" if text.startswith("RESOURCE_EXHAUSTED") else ""
    before_2_1 = "total capacity; " in text
    return OutOfMemoryMessage(**_consistent(found, processes), before_2_1=before_2_1, program=program)


def _consistent(found: dict[str, int | None], processes: list[int]) -> dict[str, int | None]:
    """Return figures whose parts do not exceed the card. Windows reports 2**64 bytes where the driver does not tell; in
    a container the process is the smallest of `processes` that holds what PyTorch reserved."""
    card, free = found["card_bytes"], found["free_bytes"]
    allocated, unused, reserved = found["allocated_bytes"], found["unused_bytes"], found["reserved_bytes"]
    if allocated is not None and reserved is None and unused is not None:
        reserved = allocated + unused
    elif allocated is not None and reserved is not None and unused is None:
        unused = max(0, reserved - allocated)
    possible = [size for size in processes if card is None or size <= card * _ROUNDING]
    process = found["process_bytes"]
    if process is not None and card is not None and process > card * _ROUNDING:
        process = None
    if process is None and reserved is not None:
        process = min((size for size in possible if size * _ROUNDING >= reserved), default=None)
        if process is not None:
            possible.remove(process)
    others = sum(possible) if possible else None
    outside = found["outside_bytes"]
    if card is not None and free is not None:
        in_use = max(0, card - free)
        if process is not None:
            others = in_use - max(process, reserved or 0)
            others = others if others > _ROUNDING_BYTES else 0
        elif reserved is not None:
            outside = max(0, in_use - reserved)
            others = min(others, outside) if others is not None else None
    context = max(0, process - reserved) if process is not None and reserved is not None else None
    return {
        **found, "process_bytes": process, "used_by_others_bytes": others, "outside_bytes": outside,
        "unused_bytes": unused, "reserved_bytes": reserved, "context_bytes": context,
    }  # fmt: skip


def _find(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return _bytes(*(group for group in match.groups() if group)) if match else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * BYTE_UNITS[unit.lower().replace("b", "ib") if len(unit) == 2 else unit.lower()])
