"""Token shards as they grow: each is written beside its place, and renamed when it is complete and synced."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from foretrain.base.errors import UserError
from foretrain.base.files import OWN, read_text, sync_folder
from foretrain.base.records import Record
from foretrain.data.prepare.reader import Position
from foretrain.data.shards import (
    BLOCK_BYTES,
    BLOCK_DIGEST_BYTES,
    HISTOGRAM_BINS,
    INDEX,
    INDEX_BYTES,
    ITEM_BYTES,
    PROGRESS,
    SPLITS,
    DatasetIndex,
    Settings,
    Shard,
    Split,
    TokenizerInfo,
    read_index,
    sealed,
    shard_name,
    unsealed,
)

_PIECE_BYTES = 2**20
_write = os.write  # replaced by tests


def open_file(path: Path, *, empty: bool = False) -> int:
    """Open a file to read and write, made where it is not there; a link is refused."""
    flags = os.O_RDWR | os.O_CREAT | OWN | getattr(os, "O_BINARY", 0) | (os.O_TRUNC if empty else 0)
    return os.open(path, flags, 0o644)


def write_all(handle: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        view = view[_write(handle, view) :]


def publish(path: Path, text: Iterable[str]) -> None:
    staging = path.with_name(f".{path.name}.new")
    handle = open_file(staging, empty=True)
    try:
        waiting = bytearray()
        for piece in text:
            waiting += piece.encode()
            if len(waiting) >= _PIECE_BYTES:
                write_all(handle, waiting)
                waiting = bytearray()
        write_all(handle, waiting)
        os.fsync(handle)
    except BaseException:
        os.close(handle)
        staging.unlink(missing_ok=True)  # frees its space
        raise
    os.close(handle)
    staging.replace(path)
    sync_folder(path.parent)


def free_bytes(folder: Path) -> int:
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            try:
                return shutil.disk_usage(place).free
            except OSError:
                return 0
    return 0


def as_user_error(error: OSError, folder: Path, needs_bytes: int) -> UserError:
    if error.errno in (errno.EDQUOT, errno.EFBIG):
        reason = error.strerror or str(error)
        return UserError(
            "disk.limit_prepare", path=str(folder), reason=reason, needs=needs_bytes, free=free_bytes(folder)
        )
    if error.errno == errno.ENOSPC:
        return UserError("disk.full_prepare", path=str(folder), needs=needs_bytes, free=free_bytes(folder))
    return UserError("environment.cannot_write", path=str(folder), reason=error.strerror or str(error))


class Part(Record):
    tokens: int = 0
    documents: int = 0
    min_id: int | None = None
    max_id: int | None = None
    sha256: str = ""


class SplitState(Record):
    part: Part = Part()
    documents: int = 0
    source_bytes: int = 0
    length_histogram: tuple[int, ...] = (0,) * HISTOGRAM_BINS
    shards: tuple[Shard, ...] = ()


class SplitWriter:
    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int, state: SplitState) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.item_bytes = ITEM_BYTES[dtype]
        self.shards = list(state.shards)
        self.documents, self.source_bytes = state.documents, state.source_bytes
        self.histogram = np.array(state.length_histogram, dtype=np.int64)
        self._handle = -1
        self._begin(state.part)
        self._restore(state.part)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards) + self.part_tokens

    def _part_path(self) -> Path:
        return self.folder / PROGRESS / shard_name(self.split, len(self.shards))

    def _begin(self, part: Part) -> None:
        self.part_tokens, self.part_documents = part.tokens, part.documents
        self.low, self.high = part.min_id, part.max_id
        self._sha, self._block, self._blocks, self._block_filled = hashlib.sha256(), hashlib.sha256(), bytearray(), 0

    def _restore(self, part: Part) -> None:
        """Restore the files of the snapshot. Raises UserError 'data.progress_damaged'."""
        for shard in self.shards:
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.tokens * self.item_bytes:
                raise UserError("data.progress_damaged", path=str(self.folder), file=shard.file)
        number = len(self.shards)
        published = self.folder / shard_name(self.split, number)
        if published.exists():  # complete when we were killed, before its snapshot
            published.replace(self._part_path())
        while (later := self.folder / shard_name(self.split, number + 1)).exists():
            later.unlink()
            number += 1
        self._open(part.tokens * self.item_bytes)
        if part.tokens:
            os.lseek(self._handle, 0, os.SEEK_SET)
            left = part.tokens * self.item_bytes
            while left and (piece := os.read(self._handle, min(left, BLOCK_BYTES))):
                self._digest(memoryview(piece))
                left -= len(piece)
            if left or self._sha.hexdigest() != part.sha256:
                raise UserError("data.progress_damaged", path=str(self.folder), file=self._part_path().name)

    def _open(self, size: int) -> None:
        self._handle = open_file(self._part_path())
        if os.fstat(self._handle).st_size > size:
            os.ftruncate(self._handle, size)
        os.lseek(self._handle, size, os.SEEK_SET)

    def append(self, ids: np.ndarray, lengths: np.ndarray, source_bytes: int) -> int:
        ends = np.cumsum(lengths, dtype=np.int64)
        assert len(ids) == (int(ends[-1]) if len(ends) else 0)
        self.documents += len(lengths)
        self.source_bytes += source_bytes
        bins = np.minimum(np.frexp(lengths.astype(np.float64))[1], HISTOGRAM_BINS - 1)  # frexp's is the bit length
        self.histogram += np.bincount(bins, minlength=HISTOGRAM_BINS)
        done = start = before = 0
        while start < len(ids):
            stop = min(len(ids), start + self.shard_tokens - self.part_tokens)
            through = int(np.searchsorted(ends, stop, side="right"))
            self._write(ids[start:stop], through - before)
            start, before = stop, through
            if self.part_tokens == self.shard_tokens:
                self.commit()
                done += 1
        return done

    def _write(self, ids: np.ndarray, documents: int) -> None:
        data = ids.data.cast("B")
        write_all(self._handle, data)
        self._digest(data)
        self.part_tokens += len(ids)
        self.part_documents += documents
        low, high = int(ids.min()), int(ids.max())
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def _digest(self, data: memoryview) -> None:
        self._sha.update(data)
        while len(data):
            piece = data[: BLOCK_BYTES - self._block_filled]
            self._block.update(piece)
            self._block_filled += len(piece)
            data = data[len(piece) :]
            if self._block_filled == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks += self._block.digest()[:BLOCK_DIGEST_BYTES]
        self._block, self._block_filled = hashlib.sha256(), 0

    def commit(self) -> None:
        assert self.low is not None
        assert self.high is not None
        if self._block_filled:
            self._end_block()
        os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1
        name = shard_name(self.split, len(self.shards))
        self._part_path().replace(self.folder / name)
        sync_folder(self.folder)
        self.shards.append(
            Shard(
                file=name, tokens=self.part_tokens, documents=self.part_documents, min_id=self.low, max_id=self.high,
                sha256=self._sha.hexdigest(), blocks=bytes(self._blocks),
            )
        )  # fmt: skip
        self._begin(Part())
        self._open(0)

    def finish(self) -> Split:
        if self.part_tokens:
            self.commit()
        self.close()
        lows, highs = [shard.min_id for shard in self.shards], [shard.max_id for shard in self.shards]
        return Split(
            tokens=self.tokens, documents=self.documents, source_bytes=self.source_bytes,
            min_id=min(lows, default=None), max_id=max(highs, default=None),
            length_histogram=tuple(int(count) for count in self.histogram), shards=tuple(self.shards),
        )  # fmt: skip

    def snapshot(self) -> SplitState:
        os.fsync(self._handle)
        part = Part(
            tokens=self.part_tokens, documents=self.part_documents, min_id=self.low, max_id=self.high,
            sha256=self._sha.copy().hexdigest(),
        )  # fmt: skip
        return SplitState(
            part=part, documents=self.documents, source_bytes=self.source_bytes,
            length_histogram=tuple(int(count) for count in self.histogram), shards=tuple(self.shards),
        )  # fmt: skip

    @property
    def is_open(self) -> bool:
        return self._handle >= 0

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


SCHEMA = "foretrain.prepare-state/1"
STATE, DIGEST = "state.json", "state_sha256"


class Identity(Record):
    settings: Settings
    tokenizer: TokenizerInfo
    source: str
    stamps: str


class Snapshot(Record):
    identity: Identity
    position: Position = Position()
    splits: dict[str, SplitState] = Field(default_factory=lambda: {split: SplitState() for split in SPLITS})
    duplicates: int = 0
    separators: int = 0
    seen: int = 0
    digest: str = ""  # over all documents so far, checked when stdin is read again
    finished: bool = False
    elapsed_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        return self.position == Position()


def write(folder: Path, snapshot: Snapshot) -> None:
    publish(folder / PROGRESS / STATE, sealed(snapshot, SCHEMA, DIGEST))


def read(folder: Path) -> Snapshot | None:
    """Return the newest snapshot. Raises UserError 'data.progress_damaged'."""
    path = folder / PROGRESS / STATE
    try:
        fields = unsealed(read_text(path, INDEX_BYTES), DIGEST)
        del fields["schema"]
        return Snapshot.model_validate(fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError, RecursionError, AttributeError, KeyError):
        raise UserError("data.progress_damaged", path=str(folder), file=f"{PROGRESS}/{STATE}") from None


def check_same(folder: Path, now: Identity, before: Identity) -> None:
    differences = _differences(now.settings.to_json(), before.settings.to_json())
    differences += _differences(now.tokenizer.to_json(), before.tokenizer.to_json(), "tokenizer ")
    if now.source != before.source:
        differences.append("the sources have other contents")
    elif now.stamps != before.stamps:
        differences.append("files of the sources were added, moved or written to")
    if differences:
        raise UserError("data.other_preparation", path=str(folder), differences="; ".join(differences))


def _differences(now: dict[str, Any], before: dict[str, Any], what: str = "") -> list[str]:
    return [
        f"{what}{key} was {str(before.get(key))[:16]}, is {str(value)[:16]}"
        for key, value in now.items()
        if value != before.get(key)
    ]


def finished(folder: Path, now: Identity) -> DatasetIndex | None:
    """Return the index of a folder with the same, finished preparation, else None. Raises UserError 'data.…'."""
    if not (folder / INDEX).is_file():
        return None
    index = read_index(folder)
    before = Identity(
        settings=index.settings, tokenizer=index.tokenizer, source=index.source.fingerprint, stamps=now.stamps
    )
    check_same(folder, now, before)
    for split in index.splits.values():
        for shard in split.shards:  # a shard may have been truncated since
            path, size = folder / shard.file, shard.tokens * ITEM_BYTES[index.dtype]
            if not path.is_file() or path.stat().st_size != size:
                raise UserError("data.prepared_damaged", path=str(folder), file=shard.file)
    shutil.rmtree(folder / PROGRESS, ignore_errors=True)  # we were killed between the index and this
    return index


def clear(folder: Path) -> None:
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder / PROGRESS, ignore_errors=True)
    for split in SPLITS:
        for path in folder.glob(f"{split}-*.bin"):
            if path.name == shard_name(split, int(path.stem[len(split) + 1 :] or 0)):
                path.unlink()
