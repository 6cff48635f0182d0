"""PyTorch's interface to CUDA's cards, CPUs and Apple's GPUs, whose facts are from torch 2.13's sources."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from foretrain.base.errors import UserError
from foretrain.base.units import GIB
from foretrain.hardware.catalogue import Gpu, find

CUDA, MPS = "cuda", "mps"
MOST_OF_RECOMMENDED = 2.0  # torch.mps.set_per_process_memory_fraction takes no more
BFLOAT16_MACOS = (14, 0)  # Metal has bfloat16 from there on


class Accelerator:
    """A CPU: nothing is asynchronous, and its allocator counts nothing. `counts`: reserved bytes are reported.
    `decides`: an optimizer's fused kernel changes nothing where its `found_inf` is 1."""

    counts, decides = False, True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def method(self) -> str:
        return "cpu allocator (profiler)"

    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        return "float32"

    def synchronize(self) -> None:
        pass

    def reset_peaks(self) -> None:
        pass

    def peaks(self) -> tuple[int | None, int | None]:
        return None, None

    def reserved(self) -> int | None:
        return None

    def empty_cache(self) -> None:
        pass

    def generator(self) -> dict[str, Tensor]:
        """Return the random state by kind of device; empty for a CPU, whose state is PyTorch's own."""
        return {}

    def restore(self, generator: Mapping[str, Tensor]) -> None:
        """Restore the random state; other kinds of device are left alone."""


class Cuda(Accelerator):
    counts = True

    @property
    def method(self) -> str:
        return "cuda allocator"

    @property
    def dtype(self) -> Literal["bfloat16", "float16"]:
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> tuple[int | None, int | None]:
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def reserved(self) -> int | None:
        return torch.cuda.memory_reserved(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def generator(self) -> dict[str, Tensor]:
        return {CUDA: torch.cuda.get_rng_state(self.device)}

    def restore(self, generator: Mapping[str, Tensor]) -> None:
        if CUDA in generator:
            torch.cuda.set_rng_state(generator[CUDA], self.device)


class Mps(Accelerator):
    """An Apple GPU. Its fused AdamW ignored `found_inf` before github.com/pytorch/pytorch/pull/186360 (June 2026)."""

    counts, decides = True, False

    @property
    def method(self) -> str:
        return "mps allocator" if self._counts_peaks else "mps allocator (sampled)"

    @property
    def dtype(self) -> Literal["bfloat16", "float16"]:
        return "bfloat16" if torch.backends.mps.is_macos_or_newer(*BFLOAT16_MACOS) else "float16"

    @property
    def _counts_peaks(self) -> bool:
        """Return whether the allocator remembers peaks, as torch 2.13's does; others report the present use."""
        try:
            return "allocated_bytes.all.peak" in torch.accelerator.memory_stats()
        except RuntimeError:
            return False

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def reset_peaks(self) -> None:
        if self._counts_peaks:
            torch.accelerator.reset_peak_memory_stats()

    def peaks(self) -> tuple[int | None, int | None]:
        """Return the driver's present use where peaks are not counted: nearly the same, as memory is kept."""
        held = torch.mps.driver_allocated_memory()  # Metal's own allocations included
        if not self._counts_peaks:
            return None, held
        return torch.accelerator.max_memory_allocated(), max(torch.accelerator.max_memory_reserved(), held)

    def reserved(self) -> int | None:
        return torch.mps.driver_allocated_memory()

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def generator(self) -> dict[str, Tensor]:
        return {MPS: torch.mps.get_rng_state()}

    def restore(self, generator: Mapping[str, Tensor]) -> None:
        if MPS in generator:
            torch.mps.set_rng_state(generator[MPS])


def ran_out(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error)


def accelerator_of(device: torch.device) -> Accelerator:
    return {CUDA: Cuda, MPS: Mps}.get(device.type, Accelerator)(device)


def apple_gpu() -> Gpu:
    """Return this Mac's GPU of the catalogue, else Metal's description; its memory is what Metal recommends."""
    name, cores = torch.backends.mps.get_name(), torch.backends.mps.get_core_count()
    memory_gib = torch.mps.recommended_max_memory() / GIB
    memory_source = "memory: torch.mps.recommended_max_memory()"
    try:
        known = find(name)
        if known.kind == MPS and known.sm_count == cores:
            return known.model_copy(update={"memory_gib": memory_gib, "source": f"{known.source}; {memory_source}"})
        name = f"{name} {cores}-core GPU"
    except UserError:  # a chip that the catalogue lacks can still train; it has no peak to compare with
        pass
    source = f"name and cores: torch.backends.mps; {memory_source}"
    return Gpu(name=name, kind=MPS, sm_count=cores, memory_gib=memory_gib, source=source)


def limit_apple(limit_bytes: int) -> int:
    recommended = torch.mps.recommended_max_memory()
    fraction = min(MOST_OF_RECOMMENDED, max(1, limit_bytes) / recommended)  # 0 would mean no limit
    torch.mps.set_per_process_memory_fraction(fraction)
    return round(fraction * recommended)
