"""`memory_limit`: a cap of PyTorch's allocator on a GPU, a watch on a CPU.

The limit is for the process as nvidia-smi shows it: the allocator's cap is the limit less the CUDA context and loaded
kernels (calibrated, or by NVML, whichever is more, and 64 MiB for later ones; else published). On an Apple GPU the cap
is the limit.

A CPU's allocator has no cap, and an address-space limit would also count reserved pages: so the process's peak (VmHWM)
is compared at each logged step. `HostGuard` ends a run shortly before Linux would kill it without a message.
"""

import threading
from collections.abc import Callable

import torch

from foretrain.base import process_memory
from foretrain.base.errors import UserError
from foretrain.base.process_memory import resident_bytes
from foretrain.base.units import MIB
from foretrain.hardware import accelerator
from foretrain.hardware.cpu import available_memory_bytes, total_memory_bytes
from foretrain.hardware.devices import LATER_KERNELS_BYTES, Context
from foretrain.training.device import Placement, beside_allocator
from foretrain.training.meter import Meter


def context_bytes(placement: Placement) -> tuple[int, str]:
    """Return (the process's bytes on the card beside PyTorch's allocator, 'measured' or 'assumed')."""
    calibration = placement.gpu.calibration
    now = beside_allocator(placement.device)
    known = [size for size in (now, calibration.context_bytes if calibration else None) if size]
    if not known:
        return Context.of(placement.gpu).expected_bytes, "assumed"
    return max(known) + LATER_KERNELS_BYTES, "measured"


def held_now_bytes(placement: Placement) -> int:
    """Return the same without an allowance for later kernels, of a process that has run its own."""
    return beside_allocator(placement.device) or Context.of(placement.gpu).expected_bytes


def peak_bytes(placement: Placement) -> int:
    own = accelerator.accelerator_of(placement.device)
    return (own.peaks()[1] if own.counts else process_memory.peak_bytes()) or 0


def cap(placement: Placement, limit_bytes: int) -> dict[str, int | str]:
    """Cap the allocator of a CUDA device; return the note's values. Raises UserError where nothing is left."""
    held, source = context_bytes(placement)
    if limit_bytes <= held:
        raise UserError("usage.limit_below_context", limit=limit_bytes, context=held, source=source)
    total = torch.cuda.get_device_properties(placement.device).total_memory
    allowed = min(total, limit_bytes - held)
    # "cuda" has no index, and this function wants one.
    index = torch.cuda.current_device() if placement.device.index is None else placement.device.index
    torch.cuda.set_per_process_memory_fraction(allowed / total, index)
    return {"limit": limit_bytes, "allowed": allowed, "context": held, "source": source}


def kept(placement: Placement, limit_bytes: int | None) -> tuple[str, dict[str, int | str]] | None:
    """Cap the allocator of a device that has one; return (id, values) of the note. Raises UserError."""
    if limit_bytes is None or placement.device.type == "cpu":
        return None
    if placement.device.type == "mps":
        return "memory_capped_mps", {"limit": limit_bytes, "allowed": accelerator.limit_apple(limit_bytes)}
    return "memory_capped", cap(placement, limit_bytes)


class Watch:
    """Compares the process's peak on a CPU with the limit; reports once that it is above."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.reported = False

    def exceeded(self, meter: Meter) -> int | None:
        if self.reported or self.limit_bytes is None:
            return None
        peak = meter.process_peak() if meter.device.type == "cpu" else None
        if peak is None or peak <= self.limit_bytes:
            return None
        self.reported = True
        return peak


class HostGuard:
    """A thread that sees the machine's memory, or its container's, run out before the kernel kills: oneDNN waits
    forever where a request fails, which rules RLIMIT_DATA out. `ends` is called once, with (this process's bytes, free,
    total), and must end the process."""

    SPARE_BYTES, SPARE_SHARE, LARGE_SHARE, EVERY_S = 512 * MIB, 0.03, 0.5, 0.2

    def __init__(
        self, ends: Callable[[int, int, int], object], free: Callable[[], int | None] = available_memory_bytes,
        total: Callable[[], int | None] = total_memory_bytes, held: Callable[[], int | None] = resident_bytes,
    ) -> None:  # fmt: skip
        self._ends, self._free, self._total, self._held = ends, free, total, held
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="foretrain-memory", daemon=True)

    def __enter__(self) -> "HostGuard":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        while not self._stop.wait(self.EVERY_S):
            if (found := self.look()) is not None:
                self._ends(*found)
                return

    def look(self) -> tuple[int, int, int] | None:
        free, total, held = self._free(), self._total(), self._held()
        if free is None or not total or held is None:
            return None
        low = free < min(self.SPARE_BYTES, self.SPARE_SHARE * total)
        return (held, free, total) if low and held >= self.LARGE_SHARE * total else None
