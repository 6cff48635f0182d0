"""A Mac's GPU that is not there: torch.mps and torch.backends.mps say that it is, and a CPU computes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foretrain.hardware import accelerator

GIB = 2**30


@dataclass
class AppleGpu:
    """What it answers, and what it was told. `counts`: whether its allocator remembers peaks, as torch 2.13's does."""

    name: str = "Apple M1 Max"
    cores: int = 32
    macos: tuple[int, int] = (15, 1)
    recommended_bytes: int = 48 * GIB
    driver_bytes: int = 3 * GIB
    allocated_peak_bytes: int = 2 * GIB
    counts: bool = True
    generator: torch.Tensor = field(default_factory=lambda: torch.tensor([1, 2, 3], dtype=torch.uint8))
    fraction: float | None = None
    told: list[str] = field(default_factory=list)

    def put(self, patch: pytest.MonkeyPatch) -> "AppleGpu":
        backend: dict[str, Any] = {
            "is_built": lambda: True, "is_available": lambda: True, "get_name": lambda: self.name,
            "get_core_count": lambda: self.cores, "is_macos_or_newer": lambda *version: self.macos >= version,
        }  # fmt: skip
        mps: dict[str, Any] = {
            "recommended_max_memory": lambda: self.recommended_bytes,
            "driver_allocated_memory": lambda: self.driver_bytes, "synchronize": lambda: self.told.append("synchronize"),
            "empty_cache": lambda: self.told.append("empty_cache"), "get_rng_state": lambda: self.generator.clone(),
            "set_rng_state": lambda state: setattr(self, "generator", state),
            "set_per_process_memory_fraction": lambda fraction: setattr(self, "fraction", fraction),
        }  # fmt: skip
        memory: dict[str, Any] = {
            "memory_stats": self._stats, "max_memory_allocated": lambda: self.allocated_peak_bytes,
            "max_memory_reserved": lambda: self.driver_bytes - 2**20,
            "reset_peak_memory_stats": lambda: self.told.append("reset"),
        }  # fmt: skip
        for module, functions in ((torch.backends.mps, backend), (torch.mps, mps), (torch.accelerator, memory)):
            for name, function in functions.items():
                patch.setattr(module, name, function)
        return self

    def _stats(self) -> dict[str, int]:
        if not self.counts:
            raise RuntimeError("Allocator for mps is not a DeviceAllocator.")
        return {"allocated_bytes.all.peak": self.allocated_peak_bytes}

    def compute_on_the_cpu(self, patch: pytest.MonkeyPatch) -> "AppleGpu":
        """What a run asks of the CPU that computes for it, it asks of this GPU."""
        patch.setattr(accelerator, "accelerator_of", lambda device: accelerator.Mps(torch.device("mps")))
        return self
