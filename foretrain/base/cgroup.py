"""The memory that a container, a batch system or systemd lets this process's group have. No torch.

Control groups are nested, and each level may have a limit; the level with the least left counts. Version 2 lies under
/sys/fs/cgroup, version 1 under /sys/fs/cgroup/memory (man 7 cgroups). Where a file is not there, nothing is limited.
"""

from pathlib import Path, PurePosixPath
from typing import NamedTuple

_FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_NO_LIMIT = 2**60  # version 1 writes a number of this size where there is none


class Limit(NamedTuple):
    """Bytes that the group may use, and how many of them it uses; the page cache is not counted, as it gives way."""

    max_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.max_bytes - self.used_bytes)


def limits(root: Path = Path("/")) -> list[Limit]:
    """The limits of all levels that have one. `root` is a stand-in for tests."""
    found = []
    for version, folder in _folders(root):
        try:
            most, used = (int((folder / name).read_text("ascii")) for name in _FILES[version])  # "max" is no number
        except (OSError, ValueError):
            continue
        if most < _NO_LIMIT:
            found.append(Limit(most, max(0, used - _cache(folder, version))))
    return found


def memory_limit(root: Path = Path("/")) -> Limit | None:
    """The level with the least left; None where nothing is limited."""
    return min(limits(root), key=lambda limit: limit.free_bytes, default=None)


def _folders(root: Path) -> list[tuple[int, Path]]:
    """(version, folder) of the process's group and those above it."""
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
