"""Runs as seen from outside: files are read, nothing is written, locked or touched, so that training is not disturbed.

A run's lock is not tried, as that would hold it for a moment in which a trainer could not take it. A run says which
process it is (now.json); of one that does not, or is in another container, Linux lists who holds which lock;
elsewhere a run lives while its files change.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretrain.training.folder import label, now
from foretrain.training.store import RunDirectory

MAX_RECORD_BYTES = 16 * 2**20
FRESH_S = 60.0
_LAST_BYTES = 65536  # hold the newest lines of any run
LOCK = "run.lock"
FILES = (
    "run.json", "metrics.jsonl", "events.jsonl", "plan.json", "sample.txt", LOCK, "trainer.json", now.FILE, label.FILE,
    "watch.json", "samples.jsonl",
)  # fmt: skip
_SMALL = ("run.json", "plan.json", "trainer.json", "watch.json")
LOCKS = Path("/proc/locks")


class ObservedRun(RunDirectory):
    def is_locked(self) -> bool:
        """Whether a living process trains here, as far as can be seen without touching the lock."""
        said = now.read(self.path)
        lives = now.lives(said) if said else None
        if lives is not None:
            return lives
        held = lock_is_held(self.path / LOCK)
        return held or age_s(self.path / "metrics.jsonl") < FRESH_S or age_s(self.path / "run.json") < FRESH_S

    def is_plain(self) -> bool:
        """Whether the folder and the files in it are neither links nor pipes, and of a sensible size."""
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        files = [self.path / name for name in FILES]
        if any(file.is_symlink() or (file.exists() and not file.is_file()) for file in files):
            return False
        small = [self.path / name for name in _SMALL]
        return all(file.stat().st_size <= MAX_RECORD_BYTES for file in small if file.exists())


def age_s(path: Path) -> float:
    """Seconds since a file changed; infinite where there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def lock_is_held(path: Path, listing: Path = LOCKS) -> bool:
    """Whether somebody holds a lock on this file, by the kernel's list of locks; False where there is no list."""
    try:
        status = path.stat()
    except OSError:
        return False
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(file in words for words in _locks(listing))


def _locks(listing: Path) -> list[list[str]]:
    """The words of each line of the kernel's list."""
    try:
        return [line.split() for line in listing.read_text("ascii", "replace").splitlines()]
    except OSError:
        return []


def held_here(listing: Path = LOCKS, processes: Path = Path("/proc")) -> list[Path]:
    """Folders of the runs whose lock some process of this machine holds, as far as we may look at its files."""
    found: set[Path] = set()
    for words in _locks(listing):
        if len(words) > 4 and words[1] == "FLOCK" and words[4].isdigit():
            found |= {path.parent for path in _open_files(processes / words[4] / "fd") if path.name == LOCK}
    return sorted(found)


def _open_files(folder: Path) -> Iterator[Path]:
    """What a process has open; nothing of another user's."""
    try:
        for link in folder.iterdir():
            yield link.readlink()
    except OSError:  # it ended meanwhile, or is not ours to see
        return


def newest_lines(file: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON lines; those that a crash or a hand has spoilt are left out."""
    try:
        with file.open("rb") as opened:
            start = max(0, file.stat().st_size - _LAST_BYTES)
            opened.seek(start)
            lines = opened.read().split(b"\n")[1 if start else 0 : -1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [line for line in found if isinstance(line, dict)]
