"""Where a run happens: device, dtype, whether to compile; each decision with its reason."""

import contextlib
import ctypes
import gc
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Any

import torch

from foretrain.base.errors import UserError
from foretrain.config.checks import check_precision, idle
from foretrain.config.options import RunConfig
from foretrain.hardware import accelerator
from foretrain.hardware.card import Cards, identity
from foretrain.hardware.catalogue import LEAST_FOR_TRITON, Dtype, Gpu, detect
from foretrain.hardware.cpu import cpu_device

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
LARGEST = 1 << 30


def keep_memory() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - musl has mallopt too, as a stub
        return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST) and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def give_back() -> None:
    """Return freed memory to the system now: `keep_memory` would count a calibration's in the peak."""
    if not sys.platform.startswith("linux"):
        return
    gc.collect()  # modules and optimizers refer to themselves
    with contextlib.suppress(OSError, AttributeError):  # another C library: there nothing was kept
        ctypes.CDLL(None).malloc_trim(0)


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Placement:
    device: torch.device
    gpu: Gpu
    dtype: Dtype
    compiled: bool
    notes: tuple[tuple[str, dict[str, Any]], ...]


def place(config: RunConfig) -> Placement:
    """Decide where a run happens. Raises UserError 'environment.…' when the wanted device is not there."""
    device = _device(config.device)
    gpu = _gpu(device)
    dtype: Dtype = accelerator.accelerator_of(device).dtype if config.dtype == "auto" else config.dtype
    check_precision(config, gpu, dtype)
    notes: list[tuple[str, dict[str, Any]]] = []
    if device.type == "mps":
        notes.append(("mps_unmeasured", {}))
    elif config.device == "auto" and device.type == "cpu" and torch.backends.mps.is_available():
        notes.append(("mps_not_taken", {"gpu": torch.backends.mps.get_name()}))
    compiled = config.compile
    if compiled and (obstacle := obstacle_to_compile(device)):
        compiled = False
        notes.append(("no_compile", {"reason": obstacle}))
    if config.attention == "bmm" and (device.type != "cpu" or config.obstacle_to_bmm):
        reason = config.obstacle_to_bmm if device.type == "cpu" else "it only runs on CPUs"
        notes.append(("no_bmm", {"reason": reason}))
    notes += [("no_effect_here", {"option": name, "reason": reason}) for name, reason in idle(config, gpu, dtype)]
    return Placement(device, gpu, dtype, compiled, tuple(notes))


def _device(wanted: str) -> torch.device:
    if wanted == "auto":  # an Apple GPU must be asked for, until a run on one was measured
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "mps" and not torch.backends.mps.is_built():
        raise UserError("environment.mps_not_built", torch=torch.__version__)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("environment.no_mps", torch=torch.__version__, macos=platform.mac_ver()[0] or "?")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "has CUDA" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise UserError("environment.no_cuda", wanted=wanted, torch=torch.__version__, built=built)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError("environment.no_such_gpu", wanted=wanted, count=torch.cuda.device_count())
    return device


def _gpu(device: torch.device) -> Gpu:
    if device.type == "cpu":
        return cpu_device()
    if device.type == "mps":
        return accelerator.apple_gpu()
    index = device.index or 0
    properties = torch.cuda.get_device_properties(index)
    try:
        found = detect(index, **identity(properties))
        if found is not None:
            return found.gpu
    except UserError:  # a card outside the catalogue can still train, without a peak to compare with
        pass
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        cuda_memory_gib=properties.total_memory / 2**30,
        source="CUDA device properties",
    )


def obstacle_to_compile(device: torch.device) -> str | None:
    if device.type == "mps":  # torch 2.13's Inductor has kernels for it, of which we ran none
        return "foretrain has not tried it on Apple GPUs"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < LEAST_FOR_TRITON:
            return "Triton needs compute capability 7.0"
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return None if any(name and shutil.which(name) for name in compilers) else "no C++ compiler was found"


def environment(placement: Placement) -> dict[str, str]:
    """Return what the run's figures depend on besides the config; no paths and no secrets."""
    import numpy

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": placement.gpu.name,
        "threads": str(torch.get_num_threads()),
    }
    if placement.device.type == "cuda":
        found["cuda"] = torch.version.cuda or ""
    if placement.device.type == "mps":
        found["macos"] = platform.mac_ver()[0]
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_NUM_THREADS",
        "CUBLAS_WORKSPACE_CONFIG",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "PYTORCH_MPS_FAST_MATH",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO",
    ):
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def identity_of(device: torch.device) -> dict[str, str]:
    return identity(torch.cuda.get_device_properties(device)) if device.type == "cuda" else {}


def beside_allocator(device: torch.device) -> int | None:
    """Return this process's bytes on a card beside PyTorch's reserved memory; None without NVML's answer."""
    if device.type != "cuda":
        return None
    cards = Cards()
    index = cards.index_of(device.index or 0, **identity_of(device))
    held = cards.held_bytes(index, {os.getpid()})
    return held - torch.cuda.memory_reserved(device) if held else None
