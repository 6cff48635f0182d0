"""Which documents were seen: an open-addressing table of 16-byte hashes in numpy, 23 to 46 bytes a document
(twice that for a moment when it grows).

A Python set takes about 110 bytes for each. The hashes themselves are also appended to a file, so that a killed
preparation has them again without reading the source anew.
"""

import os
from pathlib import Path

import numpy as np

from foretrain.data.prepare.disk import open_file, write_all

_FULL = 0.7
_SMALLEST = 1 << 12


class SeenHashes:
    """A set of 128-bit hashes, asked and filled a batch at a time."""

    def __init__(self) -> None:
        self.count = 0
        self._table = np.zeros((_SMALLEST, 2), dtype=np.uint64)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """hashes: (n, 2) uint64. (n) bool: not seen before, and the first of its kind in this batch."""
        hashes = hashes.copy()
        hashes[~hashes.any(axis=1), 0] = 1  # all zero marks a free slot
        _, first = np.unique(hashes.view("V16").ravel(), return_index=True)
        new = np.zeros(len(hashes), dtype=bool)
        new[np.sort(first)] = True
        self._grow(int(new.sum()))
        candidates = np.flatnonzero(new)
        found = self._put(hashes[candidates])
        new[candidates[found]] = False
        self.count += int(new.sum())
        return new

    def _grow(self, more: int) -> None:
        size = len(self._table)
        while self.count + more > _FULL * size:
            size *= 2
        if size > len(self._table):
            old = self._table[self._table.any(axis=1)]
            self._table = np.zeros((size, 2), dtype=np.uint64)
            for start in range(0, len(old), 1 << 16):
                self._put(old[start : start + (1 << 16)])

    def _put(self, hashes: np.ndarray) -> np.ndarray:
        """Put distinct hashes in; (n) bool: was there before. Linear probing, all of them a step at a time."""
        mask = np.uint64(len(self._table) - 1)
        slots = (hashes[:, 0] & mask).astype(np.int64)
        found = np.zeros(len(hashes), dtype=bool)
        open_ = np.arange(len(hashes))
        while len(open_):
            there = self._table[slots[open_]]
            same = (there == hashes[open_]).all(axis=1)
            found[open_[same]] = True
            free = ~there.any(axis=1)
            # Of several that want one free slot, the last write wins; the others see it taken and go on.
            self._table[slots[open_[free]]] = hashes[open_[free]]
            placed = free & (self._table[slots[open_]] == hashes[open_]).all(axis=1)
            open_ = open_[~(same | placed)]
            slots[open_] = (slots[open_] + 1) & int(mask)
        return found


class SeenFile:
    """The hashes in the order of the documents, appended; what lies beyond a snapshot is cut off."""

    def __init__(self, path: Path, seen: SeenHashes, count: int) -> None:
        self.path = path
        self.handle = open_file(path)
        os.ftruncate(self.handle, 16 * count)
        os.lseek(self.handle, 0, os.SEEK_SET)
        while piece := os.read(self.handle, 1 << 20):
            seen.add(np.frombuffer(piece, dtype=np.uint64).reshape(-1, 2))
        if seen.count != count:
            raise ValueError(f"{path.name} has {seen.count} hashes instead of {count}")

    def append(self, hashes: np.ndarray) -> None:
        """More hashes."""
        write_all(self.handle, hashes.tobytes())

    def sync(self) -> None:
        os.fsync(self.handle)

    def close(self) -> None:
        os.close(self.handle)
