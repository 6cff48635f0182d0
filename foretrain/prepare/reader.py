"""The reader process: documents of all sources in their order, shuffled in windows, as batches with positions.

One process and one order, whatever the number of tokenising workers, so the shards do not depend on it. Windows
make shuffling resumable without keeping text: window k is shuffled by (seed, k), and a position is the place where
the window begins and how many of its documents are out.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foretrain.errors import UserError
from foretrain.prepare.formats import Format, OpenFile, Place, documents
from foretrain.prepare.frames import error_frame, ignore_interrupts, limit_memory, send
from foretrain.prepare.sources import SourceFile
from foretrain.records import Record

BATCH_BYTES, BATCH_DOCUMENTS = 2**20, 4096
WINDOW_BYTES = 64 * 2**20
MEMORY_BYTES = 768 * 2**20  # that parsing may take
HASH_BYTES = 16


class Position(Record):
    """Where reading goes on: a window begins `records` into file `file`; `out` of its documents are out.

    empty, bad and replaced count what came before the window. `offset` is of uncompressed files.
    """

    file: int = 0
    records: int = 0
    offset: int = 0
    window: int = 0
    out: int = 0
    empty: int = 0
    bad: int = 0
    replaced: int = 0


class Job(Record):
    """What the reader does. `files` are in the order of reading."""

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


class _Walk:
    """All documents from a position on, file by file, with the position after each."""

    def __init__(self, job: Job, pipe: BinaryIO) -> None:
        self.job, self.pipe, self.position = job, pipe, job.position.model_copy(update={"out": 0})
        self.finished_bytes = sum(file.size_bytes or 0 for file in job.files[: job.position.file])
        self.opened: OpenFile | None = None

    def __iter__(self) -> Iterator[bytes]:
        place = Place(self.position.records, self.position.offset)
        for number in range(self.position.file, len(self.job.files)):
            file = self.job.files[number]
            if file.kind != "text" or file.remote:
                send(self.pipe, {"type": "file", "path": file.path})  # who is to blame, should this process die
            self.opened = OpenFile(file)
            for document in documents(self.opened, self.job.format, place):
                counts = {
                    "empty": self.position.empty + (document.text is None and not document.bad),
                    "bad": self.position.bad + document.bad,
                    "replaced": self.position.replaced + document.replaced,
                }
                self._move(number, document.place, counts)
                if document.text is not None:
                    yield document.text
            self.opened.close()
            self.finished_bytes += file.size_bytes or 0
            self.opened, place = None, Place()
            self._move(number + 1, place, {})

    def _move(self, file: int, place: Place, counts: dict[str, int]) -> None:
        self.position = self.position.model_copy(
            update={"file": file, "records": place.records, "offset": place.offset, **counts}
        )

    @property
    def read_bytes(self) -> int:
        return self.finished_bytes + (self.opened.read_bytes() if self.opened else 0)


def windows(walk: _Walk, shuffle_buffer: int) -> Iterator[tuple[list[bytes], Position, Position]]:
    """(documents, position before, position after) of each window; a window is bounded in documents and bytes."""
    most = shuffle_buffer or BATCH_DOCUMENTS
    most_bytes = WINDOW_BYTES if shuffle_buffer else BATCH_BYTES
    held: list[bytes] = []
    size, number, before = 0, walk.position.window, walk.position
    for text in walk:
        held.append(text)
        size += len(text)
        if len(held) >= most or size >= most_bytes:
            number += 1
            after = walk.position.model_copy(update={"window": number})
            yield held, before, after
            held, size, before = [], 0, after
    yield held, before, walk.position.model_copy(update={"window": number + 1})


def _batches(job: Job, walk: _Walk) -> Iterator[tuple[list[bytes], Position]]:
    """(documents, position after them) in the order of the shards."""
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


def serve(job: Job, pipe: BinaryIO) -> None:
    """Send all batches: {type, documents, position, read_bytes} and lengths, hashes, texts."""
    walk = _Walk(job, pipe)
    for batch, position in _batches(job, walk):
        lengths = np.array([len(text) for text in batch], dtype="<u4")
        hashes = b"".join(hashlib.sha256(text).digest()[:HASH_BYTES] for text in batch)
        header = {
            "type": "batch", "documents": len(batch), "position": position.to_json(), "read_bytes": walk.read_bytes,
        }  # fmt: skip
        send(pipe, header, lengths.tobytes(), hashes, b"".join(batch))
    send(pipe, {"type": "end"})


def main(job_file: str) -> None:
    """Read the job, limit this process's memory, and send frames on stdout."""
    ignore_interrupts()
    pipe = sys.stdout.buffer
    job = Job.from_json(Path(job_file).read_text("utf-8"))
    try:
        try:
            if any(file.kind == "parquet" or file.compression == "zstd" for file in job.files):
                import pyarrow.parquet  # noqa: F401  its own size does not count as parsing
            if any(file.remote for file in job.files):
                import huggingface_hub  # noqa: F401
        except ImportError:
            pass  # told where it is needed
        limit_memory(MEMORY_BYTES + (WINDOW_BYTES * 2 if job.shuffle_buffer else 0) + 4 * job.max_document_bytes)
        if job.sample_bytes is not None:
            from foretrain.prepare.sample import serve_sample

            serve_sample(job, pipe)
        else:
            serve(job, pipe)
    except UserError as error:
        send(pipe, error_frame(error))
    except MemoryError:
        send(pipe, {"type": "error", "id": "data.source_memory", "values": {"path": "the sources"}})
    except BrokenPipeError:
        sys.stdout = None  # type: ignore[assignment]  # the parent is gone or has enough
