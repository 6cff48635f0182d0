"""This machine's CPU as a device to plan for, its nominal peak from cores, vector width and clock; a virtual machine
reports the base clock; two FMA units per core and a flat bandwidth are assumed."""

import functools
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

from foretrain.base.process_memory import limits, memory_limit, system
from foretrain.base.units import GIB
from foretrain.hardware.calibration import load
from foretrain.hardware.catalogue import Gpu

_DEFAULT_CLOCK_GHZ = 3.0
_ASSUMED_BANDWIDTH_GB_PER_S = 20.0  # two channels of slow DDR4, a low guess; `copy_` measured 43 on the CI machine
_FMA_UNITS = 2
_FLOP_PER_FMA = 2


class Machine(NamedTuple):
    cpuinfo: str
    architecture: str
    processor: str
    cores: int


def machine() -> Machine:
    """Return this machine, or the one in the JSON file that FORETRAIN_TEST_MACHINE names, which only tests set."""
    if made_up := os.environ.get("FORETRAIN_TEST_MACHINE"):
        return Machine(**json.loads(Path(made_up).read_text("utf-8")))
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        cpuinfo = ""
    # macOS and Windows have no sched_getaffinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # platform.processor() would start `uname -p`.
    return Machine(cpuinfo, platform.machine(), "" if cpuinfo else platform.processor(), cores)


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else None


def cpu_flags() -> set[str]:
    return set((_first(r"^flags\s*:\s*(.*)$", machine().cpuinfo) or "").split())


@functools.cache
def cpu_has_bf16() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())


def usable_cores() -> int:
    return machine().cores


def cores_each(processes: int) -> int:
    return max(1, usable_cores() // processes)


def physical_cores() -> int:
    """Return usable cores, two threads of one core counted once; all where the system does not tell them apart."""
    here = machine()
    pair = r"^physical id\s*:\s*(\d+)$.*?^core id\s*:\s*(\d+)$"
    places = re.findall(pair, here.cpuinfo, re.MULTILINE | re.DOTALL)
    return min(here.cores, len(set(places)) or here.cores)


def total_memory_bytes() -> int:
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        physical = system().virtual_memory().total
    return min([physical, *(limit.max_bytes for limit in limits())])


def cpu_device() -> Gpu:
    nominal = nominal_cpu()
    return nominal.model_copy(update={"calibration": load(nominal.name)})


def nominal_cpu() -> Gpu:
    here, flags = machine(), cpu_flags()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags or not flags else 4
    clock_ghz = float(_first(r"^cpu MHz\s*:\s*(\d+(?:\.\d+)?)", here.cpuinfo) or 0) / 1e3 or _DEFAULT_CLOCK_GHZ
    cores = here.cores
    fp32_tflops = cores * lanes * _FMA_UNITS * _FLOP_PER_FMA * clock_ghz / 1e3
    # AMX: 2048 bf16 operations per clock and core (Intel's optimisation guide); AVX512_BF16 doubles the lanes.
    bf16_tflops = (
        cores * 2048 * clock_ghz / 1e3 if "amx_bf16" in flags else fp32_tflops * (2 if "avx512_bf16" in flags else 1)
    )
    model = _first(r"^model name\s*:\s*(.*)$", here.cpuinfo) or here.processor or here.architecture
    # Virtual machines give CPUs with AMX and without it one name; calibrations and choices are kept by name.
    model = re.sub(r"[^ -~]", "", model)[:60] + (", AMX" if "amx_bf16" in flags else "")
    return Gpu(
        name=f"CPU ({model}, {cores} core{'s' if cores != 1 else ''})",
        kind="cpu",
        architecture=here.architecture,
        sm_count=cores,
        boost_clock_ghz=clock_ghz,
        fp32_flop_per_clock_per_sm=lanes * _FMA_UNITS * _FLOP_PER_FMA,
        memory_gib=total_memory_bytes() / GIB,
        bandwidth_gb_per_s=_ASSUMED_BANDWIDTH_GB_PER_S,
        fp32_tflops=fp32_tflops,
        bf16_dense_tflops=bf16_tflops,
        fp16_dense_tflops=fp32_tflops,
        source="derived: cores x vector lanes x 2 FMA units x 2 x clock, from the system's description of the CPU",
    )


def available_memory_bytes() -> int | None:
    limit = memory_limit()
    if sys.platform == "linux":
        try:
            kib = _first(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
        except OSError:
            return None
        free = int(kib) * 1024 if kib else None
    else:
        free = system().virtual_memory().available
    return min((each for each in (free, limit.free_bytes if limit else None) if each is not None), default=None)
