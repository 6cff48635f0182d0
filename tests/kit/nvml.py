"""Stand-ins for NVML."""

from types import SimpleNamespace

from foretrain.base.units import GIB


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, name: str, gib: float, cores: int, used_gib: float = 2.0, capability: tuple[int, int] = (8, 9)):
        self.name, self.total, self.cores, self.used = name, round(gib * GIB), cores, round(used_gib * GIB)
        self.capability = capability
        self.shut_down = False

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self.total, used=self.used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.capability

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return self.cores

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"575.64"


GIB = 1 << 30


class Nvml(FakeNvml):
    """A card with a desktop on it and one process of ours; it gets hot, and from `breaks_at` on nothing answers."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, breaks_at: int = 10**9, processes: bool = True) -> None:
        super().__init__("NVIDIA GeForce RTX 4070", 12, 5888)
        self.breaks_at, self.processes, self.looks, self.pid = breaks_at, processes, 0, 0

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self.looks += 1
        if self.looks > self.breaks_at:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=12 * GIB, used=(2 if self.looks <= 2 else 6) * GIB)

    def _alive(self) -> None:
        if self.looks > self.breaks_at:
            raise self.NVMLError("GPU is lost")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._alive()
        return SimpleNamespace(gpu=80, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        self._alive()
        if not self.processes:
            raise self.NVMLError("Not Supported")
        ours = [SimpleNamespace(pid=pid, usedGpuMemory=4 * GIB) for pid in [self.pid] if pid]
        return [SimpleNamespace(pid=1, usedGpuMemory=2 * GIB), *ours]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._alive()
        return 0x4 | 0x20

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        self._alive()
        return 2475

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._alive()
        return 200_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._alive()
        return 1_000_000 + 5_000 * self.looks

    def nvmlDeviceGetTemperature(self, handle: int, which: int) -> int:
        self._alive()
        return 84


class Rack(Nvml):
    """Several such cards. `held`: for each card what its processes hold, in GiB by process; what is in use is their sum
    and 1 GiB more."""

    def __init__(self, held: list[dict[int, float]]) -> None:
        super().__init__()
        self.held = held

    def nvmlDeviceGetCount(self) -> int:
        return len(self.held)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self.looks += 1
        return SimpleNamespace(total=12 * GIB, used=round((sum(self.held[handle].values()) + 1) * GIB))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=round(size * GIB)) for pid, size in self.held[handle].items()]
