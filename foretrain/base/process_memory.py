"""Memory and processor time of a process and of the tree below it, as the system counts them (psutil). No torch."""

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class TreeSample(NamedTuple):
    """A process tree at one moment. `rss_bytes` counts pages that processes share once for each of them."""

    pids: tuple[int, ...]
    cpu_s: float
    rss_bytes: int


@cache
def system() -> Any:
    """psutil, imported when the first figure is asked for: it takes 19 ms, and `--help` asks for none."""
    import psutil

    return psutil


def resident_bytes(pid: int | None = None) -> int | None:
    """Resident memory of a living process, by default this one; None where it is gone or the system does not say."""
    try:
        return system().Process(pid).memory_info().rss
    except (system().Error, OSError):
        return None


def peak_bytes(pid: int | str = "self") -> int | None:
    """The most that a living process had resident; None where the system does not say.

    Linux has it as VmHWM (man 5 proc: status), which the trainer sets back before each phase; psutil does not read it.
    """
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return system().Process(None if pid == "self" else int(pid)).memory_info().peak_wset
    return None


def name_of(pid: int) -> str:
    """What the program of a process is called; "" where it is gone or the system does not say."""
    try:
        return system().Process(pid).name()
    except (system().Error, OSError, ValueError):
        return ""


def sample_tree(pid: int) -> TreeSample | None:
    """The processes from this one down; None where it is gone.

    Processor time is that of the living and, where the system says it, of those that they have waited for.
    """
    pids, cpu_s, rss_bytes = [], 0.0, 0
    try:
        root = system().Process(pid)
        processes = [root, *root.children(recursive=True)]
    except (system().Error, OSError):
        return None
    for process in processes:
        try:
            with process.oneshot():
                cpu_s += sum(process.cpu_times()[:4])  # user, system, children_user, children_system
                rss_bytes += process.memory_info().rss
        except (system().Error, OSError):  # it ended meanwhile
            continue
        pids.append(process.pid)
    return TreeSample(tuple(pids), cpu_s, rss_bytes) if pids else None
