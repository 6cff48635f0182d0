"""NVML's view of this machine's cards, without torch; a figure that is refused leaves the others."""

import os
import re
import statistics
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeGuard

from foretrain.base.records import Record

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(uuids: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, ...]:
    """Return NVML's index of each card that CUDA shows, by CUDA's number; None for a part of a card (MIG). As in CUDA
    an unknown name ends the list, and a repeated one empties it."""
    if VARIABLE not in environ:
        return tuple(range(len(uuids)))
    words = [word.strip() for word in environ[VARIABLE].split(",")]
    prefix = next((each for each in ("GPU-", "MIG-") if words[0].startswith(each)), "")
    found: list[int | None] = []
    for word in words:
        if prefix == "MIG-" and word.startswith(prefix):
            found.append(None)
            continue
        at = _by_id(word, uuids) if prefix == "GPU-" else None if prefix else _by_number(word, len(uuids))
        if at is None:
            break
        if at in found:
            return ()
        found.append(at)
    return tuple(found)


def _by_id(word: str, uuids: Sequence[str]) -> int | None:
    matching = [i for i, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _by_number(word: str, count: int) -> int | None:
    number = re.match(r"\+?(\d+)", word)  # CUDA reads a leading number
    return int(number[1]) if number and int(number[1]) < count else None


def identity(properties: Any) -> dict[str, str]:
    """Return {"uuid", "bus_id"} of torch's device properties, as NVML writes them; '' where this torch has none."""
    uuid = getattr(properties, "uuid", "")
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = all(isinstance(number, int) for number in address)
    return {"uuid": f"GPU-{uuid}" if uuid else "", "bus_id": "{:08x}:{:02x}:{:02x}.0".format(*address) if known else ""}


# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, nvmlClocksEventReason…) -> ids of texts.
REASONS = {
    0x1: "idle", 0x2: "applications_clocks", 0x4: "power_cap", 0x8: "hardware_slowdown", 0x10: "sync_boost",
    0x20: "thermal", 0x40: "hardware_thermal", 0x80: "power_brake", 0x100: "display_clocks",
}  # fmt: skip
# Of these a run gets slower than it could be. Most cards work at the power cap under full load anyway.
SLOWING = ("thermal", "hardware_thermal", "hardware_slowdown", "power_brake", "power_cap", "applications_clocks")


INTERVAL_S = 0.1  # between samples of a load
# Cores of a multiprocessor by compute capability, from the CUDA programming guide; else 128.
_CORES_PER_SM: dict[tuple[int, ...], int] = {(7, 0): 64, (7, 5): 64, (8, 0): 64, (6, 0): 64}


class CardSample(Record):
    """One card at one moment; None where NVML does not tell. `ours_bytes`: held by the watched processes; `busy`,
    `memory_busy`: NVML's utilisation; `energy_j`: since the driver was loaded."""

    index: int
    used_bytes: int | None = None
    ours_bytes: int | None = None
    busy: float | None = None
    memory_busy: float | None = None
    clock_ghz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return self == CardSample(index=self.index)


class CardFacts(Record):
    index: int
    name: str
    total_bytes: int | None
    reserved_bytes: int | None = None  # kept by the driver; None where unknown
    driver: str = ""


class Cards:
    def __init__(self, nvml: Any = None) -> None:
        self.facts: tuple[CardFacts, ...] = ()
        self.problem = ""  # why NVML fails, at the start or later
        self._refused = ""
        self._handles: list[Any] = []
        self._nvml = nvml
        self._open()

    def _open(self) -> None:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self.problem = "nvidia-ml-py is not installed"
                return
            self._nvml = pynvml
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception as error:  # the binding raises its own, OSError and, of damaged libraries, anything
            self.problem = _reason(error)
            self._handles = []
            return
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        self.facts = tuple(
            CardFacts(
                index=i, name=_text(self._ask("nvmlDeviceGetName", handle)) or f"card {i}",
                total_bytes=getattr(self._ask("nvmlDeviceGetMemoryInfo", handle), "total", None),
                reserved_bytes=self._reserved(handle), driver=driver,
            )
            for i, handle in enumerate(self._handles)
        )  # fmt: skip

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception as error:
            self._refused = _reason(error)
            return None

    def _reserved(self, handle: Any) -> int | None:
        """Return the reserved bytes, which drivers from 510 on tell in the second version of the answer."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        answer = None if version is None else self._ask("nvmlDeviceGetMemoryInfo", handle, version)
        return _number(getattr(answer, "reserved", None), int)

    def sample(self, pids: Collection[int]) -> tuple[CardSample, ...]:
        found = tuple(self._sample(i, handle, pids) for i, handle in enumerate(self._handles))
        if found:
            self.problem = self._refused if all(sample.empty for sample in found) else ""
        return found

    def one(self, index: int | None, pids: Collection[int]) -> CardSample | None:
        return self._sample(index, self._handles[index], pids) if self._has(index) else None

    def held_bytes(self, index: int | None, pids: Collection[int]) -> int | None:
        return self._ours(self._handles[index], pids) if self._has(index) else None

    def load(self, index: int | None) -> tuple[float, float] | None:
        if not self._has(index):
            return None
        clock_ghz, power_w = self._clock_ghz(self._handles[index]), self._power_w(self._handles[index])
        return None if clock_ghz is None or power_w is None else (clock_ghz, power_w)

    def cuda(self) -> tuple[int, ...] | None:
        """Return the newest CUDA release that the driver runs."""
        number = self._ask("nvmlSystemGetCudaDriverVersion_v2") if self.facts else None
        return (number // 1000, number % 1000 // 10) if isinstance(number, int) else None

    def capability(self, index: int) -> tuple[int, ...] | None:
        found = self._ask("nvmlDeviceGetCudaComputeCapability", self._handles[index])
        return found and tuple(found)

    def users(self, index: int) -> list[int]:
        """Return the processes that use a card, as far as NVML sees them."""
        kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        return sorted({each.pid for kind in kinds for each in self._ask(kind, self._handles[index]) or ()})

    def sm_count(self, index: int) -> int | None:
        capability, cores = self.capability(index), self._ask("nvmlDeviceGetNumGpuCores", self._handles[index])
        return None if capability is None or cores is None else cores // _CORES_PER_SM.get(capability, 128)

    def close(self) -> None:
        if self._nvml is not None:
            self._ask("nvmlShutdown")
        self._handles = []

    def index_of(self, cuda: int, uuid: str = "", bus_id: str = "") -> int | None:
        """Return NVML's index of CUDA's card `cuda` in this process; None where CUDA shows none so. torch's `uuid` or
        `bus_id` identify it for certain; CUDA_VISIBLE_DEVICES does not where cards differ."""
        uuids = [_text(self._ask("nvmlDeviceGetUUID", handle)) for handle in self._handles]
        if uuid in uuids and uuid:
            return uuids.index(uuid)
        for i, handle in enumerate(self._handles if bus_id else ()):
            if _text(getattr(self._ask("nvmlDeviceGetPciInfo", handle), "busId", "")).lower() == bus_id:
                return i
        shown = visible(uuids, os.environ)
        return shown[cuda] if cuda < len(shown) else None

    def _has(self, index: int | None) -> TypeGuard[int]:
        return index is not None and index < len(self._handles)

    def _sample(self, index: int, handle: Any, pids: Collection[int]) -> CardSample:
        nvml, ask = self._nvml, self._ask
        memory, shares = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetUtilizationRates", handle)
        mask = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:  # drivers before 535 know the older name
            mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return CardSample(
            index=index,
            used_bytes=_number(getattr(memory, "used", None), int),
            ours_bytes=self._ours(handle, pids),
            busy=_number(getattr(shares, "gpu", None), lambda v: v / 100),
            memory_busy=_number(getattr(shares, "memory", None), lambda v: v / 100),
            clock_ghz=self._clock_ghz(handle),
            power_w=self._power_w(handle),
            energy_j=_number(ask("nvmlDeviceGetTotalEnergyConsumption", handle), lambda v: v / 1e3),
            temperature_c=_number(
                ask("nvmlDeviceGetTemperature", handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0)), int
            ),
            reasons=tuple(name for bit, name in REASONS.items() if isinstance(mask, int) and mask & bit),
        )

    def _clock_ghz(self, handle: Any) -> float | None:
        which = getattr(self._nvml, "NVML_CLOCK_SM", 1)
        return _number(self._ask("nvmlDeviceGetClockInfo", handle, which), lambda v: v / 1e3)

    def _power_w(self, handle: Any) -> float | None:
        return _number(self._ask("nvmlDeviceGetPowerUsage", handle), lambda v: v / 1e3)

    def _ours(self, handle: Any, pids: Collection[int]) -> int | None:
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is None:
            return None
        sizes = [getattr(p, "usedGpuMemory", None) for p in processes if p.pid in pids]
        if any(size is None for size in sizes):
            return None
        return sum(size for size in sizes if size is not None)


class Load:
    """Clock and power of CUDA's card, sampled in the background of a `with`; nothing without a card or NVML."""

    def __init__(self, cuda: int | None, nvml: Any = None, **more: str) -> None:
        self._cards = None if cuda is None else Cards(nvml)
        self._index = self._cards.index_of(cuda, **more) if self._cards and cuda is not None else None
        self.driver = next((each.driver for each in self._cards.facts), "") if self._cards else ""
        self.clocks_ghz: list[float] = []
        self.watts: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while self._cards and not self._stop.wait(INTERVAL_S):
            now = self._cards.load(self._index)
            if now is None:  # the driver may break in the middle
                return
            self.clocks_ghz.append(now[0])
            self.watts.append(now[1])

    @property
    def clock_ghz(self) -> float | None:
        """Return the median SM clock of the busier half of the samples, as the card idles between kernels."""
        return _busy(self.clocks_ghz)

    @property
    def power_w(self) -> float | None:
        return _busy(self.watts)


def _busy(samples: list[float]) -> float | None:
    upper = sorted(samples)[len(samples) // 2 :]
    return statistics.median(upper) if upper else None


def _number(value: Any, to: Callable[[Any], Any]) -> Any:
    return to(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
