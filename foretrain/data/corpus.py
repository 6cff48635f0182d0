"""The built-in corpus: the sources of the Python standard library. Real text, on every machine, no download.

Test data and generated tables are left out, the order is fixed, and whole files go to one split or the other.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
_VAL_SHARE = 20  # one file in twenty


@dataclass(frozen=True)
class CorpusFile:
    """A source file: its path below the library's root, its size, and the split that it belongs to."""

    relative: str
    size_bytes: int
    split: str


def root() -> Path:
    """Where the standard library's sources are."""
    return Path(sysconfig.get_paths()["stdlib"])


@cache
def files() -> tuple[CorpusFile, ...]:
    """All files, sorted by path. The split of a file follows from its path alone."""
    base = root()
    found = []
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder) / name
                relative = path.relative_to(base).as_posix()
                digest = hashlib.sha256(relative.encode()).digest()
                split = "val" if int.from_bytes(digest[:4], "big") % _VAL_SHARE == 0 else "train"
                found.append(CorpusFile(relative, path.stat().st_size, split))
    return tuple(sorted(found, key=lambda file: file.relative))


def fingerprint() -> str:
    """A short hash of paths and sizes: another Python has another corpus."""
    digest = hashlib.sha256()
    for file in files():
        digest.update(f"{file.relative}\0{file.size_bytes}\0".encode())
    return digest.hexdigest()[:12]


def size_bytes(split: str) -> int:
    """Bytes of a split, one separator for each file included: its length in tokens of the byte tokenizer."""
    return sum(file.size_bytes + 1 for file in files() if file.split == split)


def documents(split: str) -> Iterator[bytes]:
    """The contents of a split's files, in order."""
    base = root()
    for file in files():
        if file.split == split:
            yield (base / file.relative).read_bytes()
