"""Keep freed memory in the process while it trains on a CPU.

glibc gives blocks of 32 MiB and more back to the system when they are freed, and the next step pays for each of their
pages again: at a vocabulary of 50304 that is more than half of a step's time (benchmarks/kept_memory.py).
"""

import contextlib
import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
LARGEST = 1 << 30


def keep_memory() -> bool:
    """Ask the C library not to give memory back; whether it agreed. Only glibc is asked; others keep their ways."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - musl has mallopt too, as a stub
        return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST) and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def give_back() -> None:
    """Give what was freed back to the system, now.

    What came before the training (a calibration, a measurement of what is fastest) frees gigabytes, which `keep_memory`
    would keep, and which would count as the training's own in the process's peak.
    """
    if not sys.platform.startswith("linux"):
        return
    gc.collect()  # modules and optimizers refer to themselves
    with contextlib.suppress(OSError, AttributeError):  # another C library: there nothing was kept
        ctypes.CDLL(None).malloc_trim(0)
