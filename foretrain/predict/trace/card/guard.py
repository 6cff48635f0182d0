"""Lets autograd run on fake cuda tensors in a torch without CUDA or a card, without compiling anything.

libtorch asks for a real device in two places. (1) Every autograd node asks for a device guard, and a CPU build has none
registered (c10/core/impl/DeviceGuardImplInterface.h). torch installs its own fake guard over one that counts no
devices, so an object whose methods all return 0 is registered first. (2) The engine asks the CUDA hooks whether CUDA is
built and a device has a context (aten/src/ATen/detail/CUDAHooksInterface.h): their virtual table is replaced by a copy
with two other answers. Both last as long as the process, so a worker process does it.
"""

import atexit
import ctypes
import mmap
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from foretrain.predict.trace.traced import StandInError

CUDA = 1  # c10/core/DeviceType.h
DEVICE_TYPES = 22
HOOK_SLOTS = 110
GUARD_SLOTS = 96

_alive: list[Any] = []  # what C++ points to must outlive this module


def install() -> None:
    """Install once per process. Raises StandInError on an unknown platform or build."""
    if _alive:
        return
    if not sys.platform.startswith("linux"):
        raise StandInError(f"tracing works on Linux; this is {sys.platform}")
    _start_engine()
    folder = Path(torch.__file__).parent / "lib"
    try:
        c10, cpu = ctypes.CDLL(str(folder / "libc10.so")), ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        _install_guard(c10)
        _patch_hooks(cpu)
    except (OSError, ValueError, AttributeError) as error:
        raise StandInError(f"torch {torch.__version__} is built otherwise than expected: {error}") from None
    accelerator = str(torch._C._accelerator_getAccelerator())
    if accelerator != "cuda":
        raise StandInError(f"torch {torch.__version__} took {accelerator} for its accelerator")


def _start_engine() -> None:
    """Start autograd while there is no device, so that it starts no device threads; fake tensors need none. It would
    start one for each of the guard's eight devices, and could then compute no gradient in a forked child
    (torch/csrc/autograd/engine.cpp, start_device_threads)."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).neg().backward()


def _slot(*names: str) -> int:
    """Return the slot of the first existing of these methods in the hooks' virtual table, from this torch's headers."""
    folder = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    methods: list[str] = []
    for header in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):  # new methods come after the others
        text = (folder / header).read_text("utf-8")
        found = re.findall(r"^\s*virtual\s[^;{=]*?([~\w]+)\(", text, re.MULTILINE)
        methods += [name for name in found if name not in methods]
    known = [name for name in names if name in methods]
    if not known or not methods[0].startswith("~"):
        raise ValueError(f"its AcceleratorHooksInterface has no {names[0]}")
    return 1 + methods.index(known[0])  # a virtual destructor takes two slots


def _install_guard(c10: ctypes.CDLL) -> None:
    registry = (ctypes.c_void_p * DEVICE_TYPES).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    real = registry[CUDA]
    if real is None and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda self: 0)
        address = ctypes.cast(zero, ctypes.c_void_p).value
        table = (ctypes.c_void_p * GUARD_SLOTS)(*[address] * GUARD_SLOTS)
        guard = (ctypes.c_void_p * 8)(ctypes.addressof(table))
        _alive.extend([zero, table, guard])
        registry[CUDA] = ctypes.addressof(guard)
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # torch 2.9 and before
        registry[CUDA] = _own_guard()
        return
    before = registry[CUDA]
    torch._C._ensureCUDADeviceGuardSet()  # installs its own where no device is counted, in a CUDA build too
    if registry[CUDA] == before:
        if real is not None:  # it counts a real card
            return
        registry[CUDA] = None
        raise StandInError(f"torch {torch.__version__} did not install its fake device guard")
    # torch's fake guard is in thread-local storage, which ends before the engine's threads do. Its only field is the
    # pointer to its static virtual table, so the registry gets a copy that is never freed.
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    copy = malloc(ctypes.c_size_t(64))
    ctypes.memmove(copy, registry[CUDA], 8)
    registry[CUDA] = copy


def _own_guard() -> int:
    """Return the address of a guard whose every method returns card 0, its default stream, done. Devices and streams
    are structs returned in registers, which no ctypes callback can do. On x86-64 these are rax (type 1, index 0) and
    rdx (stream 0): `mov eax, 1`, `xor edx, edx`, `ret`."""
    if platform.machine() != "x86_64":
        raise StandInError(f"tracing with torch {torch.__version__} works on x86-64; this is {platform.machine()}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x01\x00\x00\x00\x31\xd2\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    table = (ctypes.c_void_p * GUARD_SLOTS)(*[address] * GUARD_SLOTS)
    guard = (ctypes.c_void_p * 8)(ctypes.addressof(table))
    _alive.extend([page, table, guard])
    return ctypes.addressof(guard)


def _patch_hooks(cpu: ctypes.CDLL) -> None:
    get = cpu._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    hooks = get()
    old = ctypes.cast(ctypes.c_void_p.from_address(hooks).value or 0, ctypes.POINTER(ctypes.c_void_p))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda self: True)
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda self, index: False)
    # Two words stand before the slots: the offset to the top of the object, and its type.
    table = (ctypes.c_void_p * (HOOK_SLOTS + 2))(*[old[i] for i in range(-2, HOOK_SLOTS)])
    table[2 + _slot("isBuilt", "hasCUDA")] = ctypes.cast(yes, ctypes.c_void_p).value
    table[2 + _slot("hasPrimaryContext")] = ctypes.cast(no, ctypes.c_void_p).value
    _alive.extend([yes, no, table])
    slot = ctypes.c_void_p.from_address(hooks)
    atexit.register(setattr, slot, "value", slot.value)  # no Python callback after the interpreter's end
    slot.value = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)
