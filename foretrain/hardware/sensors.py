"""What NVML says of a card while it works: clock, power, and what the process holds there beside its tensors."""

import os
import statistics
import threading
from types import TracebackType
from typing import Any, Self

import torch

INTERVAL_S = 0.1


class Load:
    """Samples clock and power in the background of a `with`; without a card or NVML it samples nothing."""

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        self.device = device
        self.driver = ""
        self.clocks_ghz: list[float] = []
        self.watts: list[float] = []
        self._nvml, self._handle = nvml, None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        if self.device.type == "cuda" and self._open():
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _open(self) -> bool:
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(self.device.index or 0)
            driver = self._nvml.nvmlSystemGetDriverVersion()
        except Exception:  # the binding raises its own, OSError, ImportError and, of damaged libraries, anything
            return False
        self.driver = driver.decode() if isinstance(driver, bytes) else str(driver)
        return True

    def _sample(self) -> None:
        nvml = self._nvml
        while not self._stop.wait(INTERVAL_S):
            try:
                self.clocks_ghz.append(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM) / 1e3)
                self.watts.append(nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)
            except Exception:  # as above: the driver may break in the middle
                return

    @property
    def clock_ghz(self) -> float | None:
        """The median SM clock of the busier half of the samples, as the card idles between kernels."""
        return _busy(self.clocks_ghz)

    @property
    def power_w(self) -> float | None:
        return _busy(self.watts)

    def context_bytes(self) -> int | None:
        """What this process holds on the card beside what PyTorch's allocator reserved."""
        if self._handle is None:
            return None
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except Exception:
            return None
        mine = [p.usedGpuMemory for p in processes if p.pid == os.getpid() and p.usedGpuMemory]
        return mine[0] - torch.cuda.memory_reserved(self.device) if mine else None


def _busy(samples: list[float]) -> float | None:
    upper = sorted(samples)[len(samples) // 2 :]
    return statistics.median(upper) if upper else None
