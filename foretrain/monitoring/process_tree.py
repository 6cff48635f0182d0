"""A process and its descendants: their ids, processor time and memory, from /proc. Elsewhere there are no figures."""

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class TreeSample(NamedTuple):
    """A process tree at one moment. `rss_bytes` counts pages that processes share once for each of them."""

    pids: tuple[int, ...]
    cpu_s: float
    rss_bytes: int


def sample(pid: int) -> TreeSample | None:
    """The tree below a process; None where the system has no /proc or the process is gone.

    Processor time is that of the living and of those that they have waited for (man 5 proc: utime, stime, cutime,
    cstime in clock ticks, rss in pages).
    """
    pids, cpu_s, rss_bytes = [], 0.0, 0
    waiting, seen = [pid], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        fields = _stat(one)
        if fields is None:
            continue
        pids.append(one)
        cpu_s += sum(int(value) for value in fields[11:15]) / _ticks_per_s()
        rss_bytes += max(0, int(fields[21])) * os.sysconf("SC_PAGE_SIZE")
        waiting += _children(one)
    return TreeSample(tuple(pids), cpu_s, rss_bytes) if pids else None


def _stat(pid: int) -> list[str] | None:
    """The fields from the state on; the name before them may hold anything, so they are found by its last bracket."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 21 else None


def _children(pid: int) -> list[int]:
    """Of all its threads; a kernel without these files shows none."""
    found: list[int] = []
    try:
        for thread in os.listdir(_PROC / str(pid) / "task"):  # noqa: PTH208
            text = (_PROC / str(pid) / "task" / thread / "children").read_text()
            found += [int(word) for word in text.split()]
    except (OSError, ValueError):
        pass
    return found


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")
