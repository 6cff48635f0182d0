"""The reader process: documents of all sources, shuffled in windows, window k by (seed, k), as batches with positions:
where a window begins and how many of its documents are out."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from foretrain.base.errors import UserError
from foretrain.base.processes import Parent
from foretrain.base.records import Record
from foretrain.data.prepare.formats import documents, open_parquet
from foretrain.data.prepare.ipc import limit_memory, telling
from foretrain.data.prepare.opened import Format, OpenFile, Place, SourceFile, need_hub, need_pyarrow

BATCH_BYTES, BATCH_DOCUMENTS = 2**20, 4096
WINDOW_BYTES = 64 * 2**20
MEMORY_BYTES = 768 * 2**20  # that parsing may take
HASH_BYTES = 16
MOST_FILES, MOST_REMOTE_FILES = 200, 4
MOST_BYTES = 4 * 2**20  # of text, from all of them together


class Position(Record):
    """Where reading resumes: `records` into `file`, `out` of the window are out; the counts are of what came before."""

    file: int = 0
    records: int = 0
    offset: int = 0
    window: int = 0
    out: int = 0
    empty: int = 0
    bad: int = 0
    replaced: int = 0


class Job(Record):
    files: tuple[SourceFile, ...]
    text_column: str
    split_documents: str
    max_document_bytes: int
    skip_bad: bool
    shuffle_buffer: int
    seed: int
    position: Position = Position()
    sample_bytes: int | None = None

    @property
    def format(self) -> Format:
        return Format(self.text_column, self.split_documents, self.max_document_bytes, self.skip_bad)


Send = Callable[..., None]  # of a value and the parts of a payload


class _Walk:
    def __init__(self, job: Job, send: Send) -> None:
        start = job.position
        self.job, self.send = job, send
        self.file, self.place, self.window = start.file, Place(start.records, start.offset), start.window
        self.empty, self.bad, self.replaced = start.empty, start.bad, start.replaced
        self.finished_bytes = sum(file.size_bytes or 0 for file in job.files[: start.file])
        self.opened: OpenFile | None = None

    def __iter__(self) -> Iterator[bytes]:
        while self.file < len(self.job.files):
            file = self.job.files[self.file]
            if file.kind != "text" or file.remote:
                self.send({"type": "file", "path": file.path})  # the culprit, should this process crash
            self.opened = OpenFile(file)
            try:
                yield from self._texts(self.opened)
            except BaseException:
                self.opened.abandon()
                raise
            self.opened.close()
            self.finished_bytes += file.size_bytes or 0
            self.opened, self.place, self.file = None, Place(), self.file + 1

    def _texts(self, opened: OpenFile) -> Iterator[bytes]:
        for document in documents(opened, self.job.format, self.place):
            self.place = document.place
            if document.text is not None:
                self.replaced += document.replaced
                yield document.text
            elif document.bad:
                self.bad += 1
            else:
                self.empty += 1

    def position(self) -> Position:
        return Position(
            file=self.file, records=self.place.records, offset=self.place.offset, window=self.window,
            empty=self.empty, bad=self.bad, replaced=self.replaced,
        )  # fmt: skip

    @property
    def read_bytes(self) -> int:
        return self.finished_bytes + (self.opened.read_bytes() if self.opened else 0)


def windows(walk: _Walk, shuffle_buffer: int) -> Iterator[tuple[list[bytes], Position, Position]]:
    most = shuffle_buffer or BATCH_DOCUMENTS
    most_bytes = WINDOW_BYTES if shuffle_buffer else BATCH_BYTES
    held: list[bytes] = []
    size, before = 0, walk.position()
    for text in walk:
        held.append(text)
        size += len(text)
        if len(held) >= most or size >= most_bytes:
            walk.window += 1
            after = walk.position()
            yield held, before, after
            held, size, before = [], 0, after
    walk.window += 1
    yield held, before, walk.position()


def _batches(job: Job, walk: _Walk) -> Iterator[tuple[list[bytes], Position]]:
    out = job.position.out
    for held, before, after in windows(walk, job.shuffle_buffer):
        if job.shuffle_buffer:
            random.Random(f"{job.seed}/{before.window}").shuffle(held)
        while out < len(held):
            batch, size = [], 0
            while out < len(held) and size < BATCH_BYTES and len(batch) < BATCH_DOCUMENTS:
                size += len(held[out])
                batch.append(held[out])
                out += 1
            yield batch, after if out == len(held) else before.model_copy(update={"out": out})
        out = 0
        if not held:
            yield [], after


def hashes_of(texts: list[bytes]) -> np.ndarray:
    """Return (n, 2): the first 16 bytes of the SHA-256 of each."""
    made = b"".join(hashlib.sha256(text).digest()[:HASH_BYTES] for text in texts)
    return np.frombuffer(made, "<u8").reshape(len(texts), 2)


def serve(job: Job, send: Send) -> None:
    """Send all batches: {type, documents, position, read_bytes} and lengths, hashes, texts."""
    walk = _Walk(job, send)
    for batch, position in _batches(job, walk):
        lengths = np.array([len(text) for text in batch], dtype="<u4")
        header = {
            "type": "batch", "documents": len(batch), "position": position.to_json(), "read_bytes": walk.read_bytes,
        }  # fmt: skip
        send(header, lengths.tobytes(), hashes_of(batch).tobytes(), b"".join(batch))
    send({"type": "end"})


class FileSample(Record):
    """The sample of one file; `file_text_bytes` and `read_bytes` (read or fetched) are for all of it."""

    size_bytes: int
    text_bytes: int
    documents: int
    whole_text_bytes: float
    whole_documents: float
    whole_read_bytes: float


def spread(count: int, most: int) -> list[int]:
    return sorted({i * (count - 1) // max(1, min(most, count) - 1) for i in range(min(most, count))})


def serve_sample(job: Job, send: Send) -> None:
    most = MOST_REMOTE_FILES if any(file.remote for file in job.files) else MOST_FILES
    chosen = spread(len(job.files), most)
    wanted = (job.sample_bytes or MOST_BYTES) // len(chosen)
    for number in chosen:
        file = job.files[number]
        send({"type": "file", "path": file.path})
        opened = OpenFile(file)
        texts: list[bytes] = []
        size, place, complete = 0, Place(), True
        for document in documents(opened, job.format, Place()):
            place = document.place
            if document.text is not None:
                texts.append(document.text)
                size += len(document.text)
            if size >= wanted or len(texts) >= BATCH_DOCUMENTS:
                complete = False
                break
        sample = _scaled(opened, job, size, len(texts), place, complete=complete)
        send(
            {"type": "sample", "count": len(texts), "sample": sample.to_json()},
            np.array([len(text) for text in texts], "<u4").tobytes(), b"".join(texts),
        )  # fmt: skip
    send({"type": "end"})


def _scaled(opened: OpenFile, job: Job, size: int, count: int, place: Place, *, complete: bool) -> FileSample:
    file, factor = opened.file, 1.0
    file_size = file.size_bytes or 0
    read: float = file_size
    if file.kind == "parquet":
        parquet, leaf = open_parquet(opened, job.text_column)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        factor = parquet.metadata.num_rows / max(1, place.records)
        read = sum(group.column(leaf).total_compressed_size for group in groups)
    elif not complete:
        part: float = place.offset
        if opened.unpacked is not None:  # what was unpacked and not yet used counts for its share
            part = opened.read_bytes() * place.offset / max(1, opened.unpacked.total)
        factor = max(1.0, file_size / max(1, part))
    opened.abandon()
    return FileSample(
        size_bytes=file_size, text_bytes=size, documents=count, whole_text_bytes=size * factor,
        whole_documents=count * factor, whole_read_bytes=read,
    )  # fmt: skip


def main(parent: Parent, job_file: str) -> None:
    job = Job.from_json(Path(job_file).read_text("utf-8"))
    Path(job_file).unlink(missing_ok=True)  # now: a parent that is killed cannot

    def work() -> None:
        with contextlib.suppress(UserError):  # reported where it is needed; its own size does not count as parsing
            if any(file.kind == "parquet" or file.compression == "zstd" for file in job.files):
                need_pyarrow()
            if any(file.remote for file in job.files):
                need_hub()
        limit_memory(MEMORY_BYTES + (WINDOW_BYTES * 2 if job.shuffle_buffer else 0) + 4 * job.max_document_bytes)
        if job.sample_bytes is not None:
            serve_sample(job, parent.send)
        else:
            serve(job, parent.send)

    telling(parent, work, UserError("data.source_memory", path="the sources"))
