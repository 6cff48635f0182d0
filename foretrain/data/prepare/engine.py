"""`prepare`: sources to token shards, in constant memory, on all cores, and resumable at any moment.

reader process ─ batches in order ─> this process ─> worker processes ─> this process ─> shards, snapshots
                                     (split, dedup)   (tokenizer)         (in order)

Plain JSON lines need no reader: this process gives the workers ranges of the file, which they read by themselves.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from filelock import FileLock, Timeout

from foretrain.base.errors import UserError
from foretrain.base.files import refuse_links, sync_folder
from foretrain.base.installation import installed
from foretrain.data.prepare import vocabulary
from foretrain.data.prepare import writer as disk
from foretrain.data.prepare.encode import KEEP_TRAIN, KEEP_VAL, Ranges, can_serve, keep_of, with_line_offset
from foretrain.data.prepare.estimate import Outcome, PreparePlan, Run, Status, estimate
from foretrain.data.prepare.pool import Batch, Encoded, Reader, Workers, started
from foretrain.data.prepare.reader import Position
from foretrain.data.prepare.sources import PrepareOptions, SourceList, expand
from foretrain.data.prepare.writer import Identity, Snapshot, SplitWriter, open_file, write_all
from foretrain.data.shards import (
    INDEX,
    ITEM_BYTES,
    PROGRESS,
    SPLITS,
    Counts,
    DatasetIndex,
    Source,
    TokenizerInfo,
    dtype_for,
    index_text,
)

# The table takes 23 to 46 bytes per document, twice that while it grows; a Python set takes about 110. Hashes also go
# to a file, so that a killed preparation need not read the source again.

_FULL = 0.7
_SMALLEST = 1 << 12


class SeenHashes:
    def __init__(self) -> None:
        self.count = 0
        self._table = np.zeros((_SMALLEST, 2), dtype=np.uint64)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """hashes: (n, 2) uint64. Return (n) bool: not seen before, and the first of its kind in this batch."""
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
        """Insert distinct hashes; return (n) bool: was there before. Linear probing, a step for all at a time."""
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
        write_all(self.handle, hashes.tobytes())

    def sync(self) -> None:
        os.fsync(self.handle)

    def close(self) -> None:
        os.close(self.handle)


SNAPSHOT_S = 5.0
_WAIT_S = 0.2
_USUAL_BYTES_PER_TOKEN = 4.0


@dataclass
class _Pending:
    future: "Future[Encoded]"
    position: Position
    read_bytes: int
    seen: int
    duplicates: int
    digest: str


class Preparation:
    def __init__(self, run: Run, snapshot: Snapshot | None) -> None:
        self.run_, self.options, self.folder = run, run.options, run.folder
        self.resumed = snapshot is not None
        self.at = snapshot or Snapshot(identity=run.identity)
        if snapshot is None:
            disk.write(self.folder, self.at)
        self.dtype = dtype_for(run.vocab_size - 1)
        self.writers = {
            split: SplitWriter(self.folder, split, self.dtype, self.options.shard_tokens, self.at.splits[split])
            for split in SPLITS
        }
        self.seen = SeenHashes()
        self.seen_file = self._open_seen() if self.options.dedup else None
        self.duplicates = self.at.duplicates
        # stdin cannot be resumed in the middle: it is read again, and must not have changed.
        self.is_one = self.options.is_one_document
        self.replaying = self.resumed and any(file.kind == "stdin" for file in run.sources.files)
        self.digest = "" if self.replaying else self.at.digest
        self.pending: deque[_Pending] = deque()
        self.read_bytes, self.started_s, self.earlier_s = 0, time.monotonic(), self.at.elapsed_s
        self.next_snapshot_s = self.started_s + SNAPSHOT_S
        self.reader: Reader | Ranges | None = None
        self.ranges = False  # whether the workers read
        self.workers: Workers | None = None

    def _open_seen(self) -> SeenFile:
        try:
            return SeenFile(self.folder / PROGRESS / "seen.bin", self.seen, self.at.seen)
        except ValueError:
            raise UserError("data.progress_damaged", path=str(self.folder), file="seen.bin") from None

    def run(self) -> Outcome:
        try:
            if not self.at.finished:
                self.workers = Workers(
                    self.run_.children, self.folder / PROGRESS / vocabulary.FOLDER,
                    self.at.identity.tokenizer.name, self.dtype,
                )  # fmt: skip
                start = Position() if self.replaying else self.at.position
                job = self.options.job(self.run_.sources, start)
                self.ranges = can_serve(job, dedup=self.options.dedup)
                self.reader = Ranges(job, self.options.val_share) if self.ranges else Reader(job)
                if signal := self._read_and_write():
                    self._snapshot()
                    return Outcome(None, self.resumed, signal=signal, tokens=self.tokens, elapsed_s=self._elapsed_s())
            return self._finish()
        except UserError:
            self._keep()
            raise
        except OSError as error:
            raise disk.as_user_error(error, self.folder, self._still_needed()) from None
        finally:
            self._end()

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers.values())

    def _elapsed_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.started_s

    def _read_and_write(self) -> str:
        ended, most = False, (8 if self.ranges else 2) * self.options.workers + 2  # a range that waits takes nothing
        while self.pending or not ended:
            if signal := self.run_.should_stop():
                return signal
            if not ended and len(self.pending) < most:
                ended = self._take(0.01 if self.pending else _WAIT_S) or ended
            if self.pending and (ended or len(self.pending) >= most or self.pending[0].future.done()):
                try:
                    made = self.pending[0].future.result(timeout=_WAIT_S)
                except TimeoutError:
                    continue
                except UserError as error:
                    raise with_line_offset(error, self._lines_before(self.pending[0])) from None
                if self._store(self.pending.popleft(), made):
                    return ""
        if self.replaying:
            self._other_stdin()
        return ""

    def _other_stdin(self) -> NoReturn:
        raise UserError(
            "data.other_preparation", path=str(self.folder), differences="stdin has other contents than before"
        )

    def _take(self, timeout_s: float) -> bool:
        assert self.reader is not None
        assert self.workers is not None
        frame = self.reader.next(timeout_s)
        if frame is None or frame[0]["type"] == "file":
            return False
        if frame[0]["type"] == "end":
            return True
        if self.ranges:
            header = frame[0]
            self._wait_for(self.workers.read(header["range"]), Position(**header["position"]), header["read_bytes"])
            return False
        batch = Batch.of(*frame)
        if any(file.kind == "stdin" for file in self.run_.sources.files):
            self.digest = hashlib.sha256(self.digest.encode() + batch.hashes.tobytes()).hexdigest()
        if self.replaying:
            if batch.position == self.at.position:
                if self.digest != self.at.digest:
                    self._other_stdin()
                self.replaying = False
            return False
        keep = self._keep_of(batch)
        self._wait_for(self.workers.encode(keep, batch.lengths, batch.text), batch.position, batch.read_bytes)
        return False

    def _wait_for(self, future: "Future[Encoded]", position: Position, read_bytes: int) -> None:
        self.pending.append(_Pending(future, position, read_bytes, self.seen.count, self.duplicates, self.digest))

    def _keep_of(self, batch: Batch) -> np.ndarray:
        """Return (n) by the document's hash: its split, or 0 for a duplicate text."""
        keep = keep_of(batch.hashes, 0.0 if self.is_one else self.options.val_share)
        if self.seen_file is not None and len(keep):
            new = self.seen.add(batch.hashes)
            self.seen_file.append(batch.hashes[new])
            keep[~new] = 0
            self.duplicates += int((~new).sum())
        return keep

    def _store(self, done: _Pending, made: Encoded) -> bool:
        keep, tokens = made.keep, made.tokens
        left = None if self.options.max_tokens is None else self.options.max_tokens - self.tokens
        reached = left is not None and int(tokens.sum(dtype=np.int64)) >= left
        last = len(keep)
        if reached and left is not None:  # the document that reaches it is the last
            last = int(np.searchsorted(np.cumsum(tokens, dtype=np.int64), left)) + 1
        start = committed = 0
        for split, mark in (("train", KEEP_TRAIN), ("val", KEEP_VAL)):
            mine = keep == mark
            count = int(tokens[mine].sum(dtype=np.int64))
            mine[last:] = False
            wanted = tokens[mine]
            ids = made.ids[start : start + int(wanted.sum(dtype=np.int64))]
            source_bytes = int(made.lengths[mine].sum(dtype=np.int64))
            if self.is_one and split == "train":
                committed += self._append_cut(ids, source_bytes)
            else:
                committed += self.writers[split].append(ids, wanted, source_bytes)
            start += count
        beyond = int((keep[last:] == 0).sum())  # duplicates found after the last document
        self.read_bytes = done.read_bytes
        self.at = self.at.model_copy(
            update={
                "position": self._position(done, made), "duplicates": done.duplicates - beyond, "seen": done.seen,
                "digest": done.digest, "separators": self.at.separators + made.separators, "finished": reached,
            }
        )  # fmt: skip
        if committed or reached or time.monotonic() > self.next_snapshot_s:
            self._snapshot()
        self._tell()
        return reached

    def _lines_before(self, done: _Pending) -> int:
        return self.at.position.records if self.ranges and self.at.position.file == done.position.file else 0

    def _position(self, done: _Pending, made: Encoded) -> Position:
        """Return the place after a batch. The lines of a range are counted when they were read, so here."""
        if not self.ranges:
            return done.position
        before = self.at.position
        counts = {name: getattr(before, name) + getattr(made, name) for name in ("empty", "bad", "replaced")}
        return done.position.model_copy(update={**counts, "records": self._lines_before(done) + made.records})

    def _append_cut(self, ids: np.ndarray, source_bytes: int) -> int:
        """Append the one document: its last tokens are for validation. Return shards completed."""
        val = round(len(ids) * self.options.val_share)
        committed, bytes_left = 0, source_bytes
        for split, part in (("val", ids[len(ids) - val :]), ("train", ids[: len(ids) - val])):
            if len(part):
                own = bytes_left if split == "train" else round(source_bytes * self.options.val_share)
                bytes_left -= own
                committed += self.writers[split].append(part, np.array([len(part)]), own)
        return committed

    def _tell(self) -> None:
        shards = sum(len(writer.shards) for writer in self.writers.values())
        documents = sum(writer.documents for writer in self.writers.values())
        self.run_.listen(
            Status(documents, self.tokens, self.read_bytes, self.run_.sources.total_bytes, self._elapsed_s(), shards)
        )

    def _snapshot(self) -> None:
        start = time.monotonic()
        if self.seen_file is not None:
            self.seen_file.sync()
        splits = {split: writer.snapshot() for split, writer in self.writers.items()}
        self.at = self.at.model_copy(update={"splits": splits, "elapsed_s": self._elapsed_s()})
        disk.write(self.folder, self.at)
        # A snapshot of a thousand shards takes longer; it never takes more than a twentieth of the time.
        end = time.monotonic()
        self.next_snapshot_s = end + max(SNAPSHOT_S, 20 * (end - start))

    def _keep(self) -> None:
        try:
            if all(writer.is_open for writer in self.writers.values()):
                self._snapshot()
        except OSError:
            pass  # the last snapshot still holds

    def _still_needed(self) -> int:
        item, total = ITEM_BYTES[self.dtype], self.run_.sources.total_bytes
        shard = (self.options.shard_tokens - self.writers["train"].part_tokens) * item
        if self.run_.plan is not None and self.run_.plan.output_bytes is not None:
            return max(self.run_.plan.output_bytes - self.tokens * item, 2**20)
        if total is not None and self.read_bytes and self.tokens:
            return round(max(total / self.read_bytes - 1, 0.01) * self.tokens * item)
        return shard if total is None else round(total / _USUAL_BYTES_PER_TOKEN) * item

    def _finish(self) -> Outcome:
        if not self.writers["train"].tokens:
            raise UserError("data.source_no_text", path=self.run_.sources.description)
        self._snapshot()
        identity, place = self.at.identity, self.at.position
        splits = {split: writer.finish() for split, writer in self.writers.items()}
        vocabulary.publish(self.folder)
        self._end()  # the workers' memory is free before the index of a long source takes some
        index = DatasetIndex(
            dtype=self.dtype, vocab_size=self.run_.vocab_size, tokenizer=identity.tokenizer,
            source=Source(
                fingerprint=identity.source, description=self.run_.sources.description,
                files=len(self.run_.sources.files), source_bytes=self.run_.sources.total_bytes,
            ),
            settings=identity.settings,
            counts=Counts(
                empty=place.empty, bad=place.bad, replaced_utf8=place.replaced, duplicates=self.at.duplicates,
                separator_bytes=self.at.separators,
            ),
            splits=splits, foretrain_version=installed("foretrain"),
        )  # fmt: skip
        disk.publish(self.folder / INDEX, index_text(index))
        shutil.rmtree(self.folder / PROGRESS, ignore_errors=True)
        return Outcome(index, self.resumed, tokens=index.tokens, elapsed_s=self._elapsed_s())

    def _end(self) -> None:
        if self.reader is not None:
            self.reader.end()
        if self.workers is not None:
            self.workers.end()
        self.reader = self.workers = None
        for writer in self.writers.values():
            writer.close()
        if self.seen_file is not None:
            self.seen_file.close()
            self.seen_file = None


LOCK = ".prepare.lock"
_MOST_PACKED = 30  # text packs 3 to 10 fold


def plan(options: PrepareOptions) -> PreparePlan:
    """Return what preparing would take; nothing is written in `out`. Raises UserError."""
    sources = _found(options)
    with tempfile.TemporaryDirectory(prefix="foretrain-") as place:
        info, size = vocabulary.make(options, sources, Path(place), plan=True)
        saved = Path(place) / vocabulary.FOLDER
        return estimate(options, sources, saved, info.name, size)


def prepare(
    options: PrepareOptions,
    should_stop: Callable[[], str] = lambda: "",
    listen: Callable[[Status], None] = lambda status: None,
) -> Outcome:
    """Prepare, or resume, the dataset in `options.out`. should_stop: the name of a received signal, or ''. Raises
    UserError; the same command resumes committed work."""
    folder = Path(options.out)
    if any(Path(source).is_dir() and Path(source).resolve() == folder.resolve() for source in options.sources):
        raise UserError("usage.out_is_source", path=options.out)
    if (folder / "run.json").exists():
        raise UserError("usage.out_is_run", path=options.out)
    sources = _found(options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError("usage.being_prepared", path=str(folder)) from None
    except OSError as error:
        raise disk.as_user_error(error, folder, 2**20) from None
    try:
        return _prepare_locked(options, folder, sources, should_stop, listen)
    except OSError as error:
        raise disk.as_user_error(error, folder, 2**20) from None
    finally:
        lock.release()
        (folder / LOCK).unlink(missing_ok=True)


def _found(options: PrepareOptions) -> SourceList:
    sources = expand(options.sources)
    if sources.total_bytes == 0:
        raise UserError("data.source_empty", path=sources.description)
    return sources


def _prepare_locked(
    options: PrepareOptions,
    folder: Path,
    sources: SourceList,
    should_stop: Callable[[], str],
    listen: Callable[[Status], None],
) -> Outcome:
    refuse_links([folder / PROGRESS])
    own = (folder / PROGRESS).is_dir() or (folder / INDEX).is_file()
    if not own and any(path for split in SPLITS for path in folder.glob(f"{split}*.bin")):
        raise UserError("data.out_in_use", path=str(folder))
    if options.restart and own:
        disk.clear(folder)
    if (folder / INDEX).is_file():
        info = disk.read_index(folder).tokenizer
        _check_request(options, folder, info)
        index = disk.finished(folder, _identity(options, sources, info))
        assert index is not None
        return Outcome(index, resumed=False, existed=True, tokens=index.tokens)
    (folder / PROGRESS).mkdir(exist_ok=True)
    sync_folder(folder)
    with started(options.workers) as children:
        snapshot = disk.read(folder)
        if snapshot is None or snapshot.is_empty:
            snapshot = None  # nothing was written yet, so anything may change
            vocabulary.forget_other(options.request, folder / PROGRESS)
        info, size = vocabulary.make(options, sources, folder / PROGRESS)
        _check_request(options, folder, info)
        identity = _identity(options, sources, info)
        if snapshot is not None:
            disk.check_same(folder, identity, snapshot.identity)
        saved = folder / PROGRESS / vocabulary.FOLDER
        run = Run(options, folder, sources, identity, size, children, should_stop, listen)
        _check_room(run, saved, snapshot)
        return Preparation(run, snapshot).run()


def _check_request(options: PrepareOptions, folder: Path, info: TokenizerInfo) -> None:
    if info.request != options.request:
        differences = f"tokenizer was {info.request}, is {options.request}"
        raise UserError("data.other_preparation", path=str(folder), differences=differences)


def _identity(options: PrepareOptions, sources: SourceList, info: TokenizerInfo) -> Identity:
    return Identity(settings=options.settings, tokenizer=info, source=sources.fingerprint, stamps=sources.stamps)


def _check_room(run: Run, saved: Path, snapshot: Snapshot | None) -> None:
    """Raise UserError 'disk.no_room_prepare' where the rest does not fit on the disk."""
    free, total = disk.free_bytes(run.folder), run.sources.total_bytes
    packed = any(file.compression or file.kind == "parquet" for file in run.sources.files)
    if total is None or total * 4 * (_MOST_PACKED if packed else 1) < free:
        return
    run.plan = estimate(run.options, run.sources, saved, run.identity.tokenizer.name, run.vocab_size)
    item = ITEM_BYTES[run.plan.dtype]
    splits = snapshot.splits.values() if snapshot else ()
    there = item * sum(split.part.tokens + sum(shard.tokens for shard in split.shards) for split in splits)
    assert run.plan.output_bytes is not None
    if run.plan.output_bytes - there > run.plan.free_bytes:
        raise UserError(
            "disk.no_room_prepare", path=str(run.folder), needs=run.plan.output_bytes - there,
            free=run.plan.free_bytes, tokens=run.plan.tokens,
        )  # fmt: skip
