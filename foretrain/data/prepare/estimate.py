"""`prepare --plan`: what a preparation reads, writes, holds and takes, from a look at a few files of the source."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from foretrain.base import process_memory
from foretrain.base.errors import UserError
from foretrain.base.processes import Child
from foretrain.base.records import Record
from foretrain.data.prepare.encode import KEEP_TRAIN, can_serve
from foretrain.data.prepare.pool import Reader, Workers, started
from foretrain.data.prepare.reader import MOST_BYTES, WINDOW_BYTES, FileSample, Position
from foretrain.data.prepare.sources import PrepareOptions, SourceList
from foretrain.data.prepare.writer import Identity, free_bytes
from foretrain.data.shards import ITEM_BYTES, DatasetIndex, dtype_for

_SEEN_BYTES = 92  # most that the table of hashes takes for a document
_UNKNOWN_PROCESS_BYTES = 150 * 2**20  # where the system does not say what a process holds


class PreparePlan(Record):
    """An estimate from `sampled_documents` documents; None where stdin cannot be asked. read_bytes: from the network
    where `remote`. output_bytes: shards on disk. memory_bytes: all processes together. `duration_s`: without
    reading."""

    description: str
    files: int
    remote: bool
    source_bytes: int | None
    read_bytes: int | None
    text_bytes: int | None
    documents: int | None
    tokens: int | None
    tokens_in_source: int | None
    bytes_per_token: float | None
    dtype: str
    vocab_size: int
    tokenizer: str
    output_bytes: int | None
    shards: int | None
    memory_bytes: int
    tokens_per_s: float | None
    duration_s: float | None
    workers: int
    free_bytes: int
    sampled_documents: int
    sampled_bytes: int
    left_out: dict[str, int] = Field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.output_bytes is None or self.output_bytes <= self.free_bytes


def peak_bytes(pid: int | str) -> int:
    return process_memory.peak_bytes(pid) or _UNKNOWN_PROCESS_BYTES


def estimate(options: PrepareOptions, sources: SourceList, tokenizer: Path, name: str, size: int) -> PreparePlan:
    """Read a sample, tokenize it with one worker, and scale by file sizes. Raises UserError 'data.source_…'."""
    dtype = dtype_for(size - 1)
    common: dict[str, Any] = {
        "description": sources.description, "files": len(sources.files), "source_bytes": sources.total_bytes,
        "remote": any(file.remote for file in sources.files), "dtype": dtype, "vocab_size": size,
        "tokenizer": options.request, "workers": options.workers, "free_bytes": free_bytes(Path(options.out)),
        "left_out": sources.left_out,
    }  # fmt: skip
    with started(1) as children:
        workers = Workers(children, tokenizer, name, dtype)
        try:
            if sources.total_bytes is None:
                workers.encode(*_batch([b"a"])).result()  # so that it is loaded
                memory = _memory(options, peak_bytes(workers.children[0].process.pid), _UNKNOWN_PROCESS_BYTES, 0)
                blank = dict.fromkeys(
                    ("read_bytes", "text_bytes", "documents", "tokens", "tokens_in_source", "bytes_per_token",
                     "output_bytes", "shards", "tokens_per_s", "duration_s")
                )  # fmt: skip
                return PreparePlan(**common, **blank, memory_bytes=memory, sampled_documents=0, sampled_bytes=0)
            found = _sample(options, sources, workers)
            worker_bytes = peak_bytes(workers.children[0].process.pid)
        finally:
            workers.end()
    return _scaled(options, sources, common, found, worker_bytes)


class _SampleSums:
    def __init__(self) -> None:
        self.files: list[FileSample] = []
        self.tokens, self.text_bytes, self.documents, self.busy_s, self.reader_bytes = 0, 0, 0, 0.0, 0


def _batch(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray, memoryview]:
    lengths = np.array([len(text) for text in texts], "<u4")
    return np.full(len(texts), KEEP_TRAIN, np.uint8), lengths, memoryview(b"".join(texts))


def _sample(options: PrepareOptions, sources: SourceList, workers: Workers) -> _SampleSums:
    found = _SampleSums()
    workers.encode(*_batch([b"A tokenizer is loaded at its first word."])).result()
    reader = Reader(options.job(sources, Position(), MOST_BYTES))
    try:
        while True:
            frame = reader.next(0.2)
            if frame is None:
                continue
            found.reader_bytes = max(found.reader_bytes, peak_bytes(reader.child.process.pid))
            header, payload = frame
            if header["type"] == "end":
                return found
            if header["type"] == "sample":
                found.files.append(FileSample.model_validate(header["sample"]))
                view, count = memoryview(payload), header["count"]
                lengths = np.frombuffer(view[: 4 * count], "<u4")
                start = time.perf_counter()
                made = workers.encode(np.full(count, KEEP_TRAIN, np.uint8), lengths, view[4 * count :]).result()
                found.busy_s += time.perf_counter() - start
                found.tokens += len(made.ids)
                found.text_bytes += int(lengths.sum())
                found.documents += count
    finally:
        reader.end()


def _scaled(
    options: PrepareOptions, sources: SourceList, common: dict[str, Any], found: _SampleSums, worker_bytes: int
) -> PreparePlan:
    if not found.tokens:
        raise UserError("data.source_no_text", path=sources.description)
    total = sources.total_bytes or 0
    factor = total / max(1, sum(file.size_bytes for file in found.files))
    text = factor * sum(file.whole_text_bytes for file in found.files)
    documents = factor * sum(file.whole_documents for file in found.files)
    read = factor * sum(file.whole_read_bytes for file in found.files)
    tokens_in_source = text * found.tokens / found.text_bytes
    share = min(1.0, options.max_tokens / tokens_in_source) if options.max_tokens else 1.0
    tokens = tokens_in_source * share
    rate = found.tokens / max(found.busy_s, 1e-6) * options.workers
    item = ITEM_BYTES[common["dtype"]]
    by_workers = can_serve(options.job(sources, Position()), dedup=options.dedup)  # without a reader process
    return PreparePlan(
        **common,
        read_bytes=round(read * share), text_bytes=round(text * share), documents=round(documents * share),
        tokens=round(tokens), tokens_in_source=round(tokens_in_source),
        bytes_per_token=found.text_bytes / found.tokens, output_bytes=round(tokens * item),
        shards=math.ceil(tokens * (1 - options.val_share) / options.shard_tokens)
        + (math.ceil(tokens * options.val_share / options.shard_tokens)),
        memory_bytes=_memory(
            options, worker_bytes, 0 if by_workers else found.reader_bytes, round(documents * share)
        ),
        tokens_per_s=rate, duration_s=tokens / rate, sampled_documents=found.documents,
        sampled_bytes=found.text_bytes,
    )  # fmt: skip


def _memory(options: PrepareOptions, worker_bytes: int, reader_bytes: int, documents: int) -> int:
    window = 2 * WINDOW_BYTES if options.shuffle_buffer else 0
    seen = _SEEN_BYTES * documents if options.dedup else 0
    return peak_bytes(os.getpid()) + reader_bytes + options.workers * worker_bytes + window + seen


@dataclass(frozen=True)
class Status:
    documents: int
    tokens: int
    read_bytes: int
    total_bytes: int | None
    elapsed_s: float
    shards: int


@dataclass(frozen=True)
class Outcome:
    index: DatasetIndex | None
    resumed: bool
    existed: bool = False
    signal: str = ""
    tokens: int = 0
    elapsed_s: float = 0.0


@dataclass
class Run:
    options: PrepareOptions
    folder: Path
    sources: SourceList
    identity: Identity
    vocab_size: int
    children: list[Child]  # its workers to be
    should_stop: Callable[[], str]
    listen: Callable[[Status], None]
    plan: PreparePlan | None = None
