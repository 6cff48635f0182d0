"""Memory and processor time of a process and of the tree below it, as the system counts them (psutil). No torch."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple


@contextmanager
def collected_later(*, stays: bool = False) -> Iterator[None]:
    """Turn off the search for reference cycles within. `stays`: never visit what is there at the end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was:
            gc.enable()


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Search for reference cycles seldom within: few of a plan's million objects are in one."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class TreeSample(NamedTuple):
    pids: tuple[int, ...]
    cpu_s: float
    rss_bytes: int


@cache
def system() -> Any:
    """Return psutil, imported late: it takes 19 ms, and `--help` asks for no figure."""
    import psutil

    return psutil


def resident_bytes(pid: int | None = None) -> int | None:
    try:
        return system().Process(pid).memory_info().rss
    except (system().Error, OSError):
        return None


def peak_bytes(pid: int | str = "self") -> int | None:
    """Return a living process's peak resident memory, Linux's VmHWM; None where the system does not say."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return system().Process(None if pid == "self" else int(pid)).memory_info().peak_wset
    return None


def sample_tree(pid: int) -> TreeSample | None:
    """Sum the process tree below this one, ended children included where known; None where it is gone."""
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


# Memory limits of containers, batch systems and systemd. Control groups are nested; the level with the least left
# counts. Version 2 is under /sys/fs/cgroup, version 1 under /sys/fs/cgroup/memory (man 7 cgroups). A missing file means
# no limit.

_FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_NO_LIMIT = 2**60  # version 1 writes a number of this size where there is none


class Limit(NamedTuple):
    """Bytes that the control group may use and uses, without the page cache, which can be dropped."""

    max_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.max_bytes - self.used_bytes)


def limits(root: Path = Path("/")) -> list[Limit]:
    found = []
    for version, folder in _folders(root):
        try:
            most, used = (int((folder / name).read_text("ascii")) for name in _FILES[version])  # "max" is not a number
        except (OSError, ValueError):
            continue
        if most < _NO_LIMIT:
            found.append(Limit(most, max(0, used - _cache(folder, version))))
    return found


def memory_limit(root: Path = Path("/")) -> Limit | None:
    return min(limits(root), key=lambda limit: limit.free_bytes, default=None)


def _folders(root: Path) -> list[tuple[int, Path]]:
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        if not version or ".." in path.split("/"):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        inside = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, while the mount shows the group itself as its top.
        found += [(version, base / level) for level in (inside, *inside.parents)]
    return list(dict.fromkeys(found))


def _cache(folder: Path, version: int) -> int:
    names = ("inactive_file", "active_file") if version == 2 else ("total_inactive_file", "total_active_file")
    try:
        pairs = (line.split() for line in (folder / "memory.stat").read_text("ascii", "replace").splitlines())
        return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)
    except (OSError, ValueError):
        return 0
