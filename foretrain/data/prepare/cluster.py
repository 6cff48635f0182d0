"""The same shards from a `datatrove` pipeline, so from many machines (`pip install 'foretrain[cluster]'`).

Two steps (github.com/huggingface/datatrove), for its local, Slurm and Ray executors alike:

    Tokens(out)   each task tokenizes its documents into parts of its own, OUT/.parts/train-00007.ids …
    Shards(out)   one task cuts the parts, in the order of the tasks, into shards, and writes the index

OUT is a folder that all machines see. A document's split is decided by its hash, as in `foretrain prepare`. A task that
is run again writes its parts again; the index comes last, and only when the parts of all tasks are there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.pipeline.base import PipelineStep

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.safe_read import read_text
from foretrain.data import tokenizer as tokenizers
from foretrain.data.prepare import disk, vocabulary
from foretrain.data.prepare.encode import KEEP_TRAIN, KEEP_VAL, encode_batch, encoder_of, keep_of
from foretrain.data.prepare.options import DEFAULT_DOCUMENT_BYTES, PrepareOptions
from foretrain.data.prepare.reader import hashes_of
from foretrain.data.prepare.sources import SourceList
from foretrain.data.prepare.writer import SplitState, SplitWriter
from foretrain.data.shards import (
    DEFAULT_SHARD_TOKENS,
    INDEX,
    PROGRESS,
    SPLITS,
    Counts,
    DatasetIndex,
    Settings,
    Source,
    Split,
    TokenizerInfo,
    dtype_for,
    index_text,
)

PARTS = ".parts"
_BATCH_BYTES = 4 * 2**20
_PIECE_TOKENS = 2**22
_KEEP = {"train": KEEP_TRAIN, "val": KEEP_VAL}


class Written(Record):
    """What a task wrote of one split."""

    tokens: int = 0
    documents: int = 0
    source_bytes: int = 0
    ids_sha256: str = ""
    lengths_sha256: str = ""


class Part(Record):
    """What a task says of its work, written last."""

    rank: int
    world_size: int
    dtype: str
    vocab_size: int
    tokenizer: TokenizerInfo
    val_share: float
    empty: int
    splits: dict[str, Written]


class Tokens(PipelineStep):
    """Documents to ids: a part for each task. `tokenizer` as in `foretrain prepare --tokenizer`."""

    name = "foretrain tokens"
    type = "🔢 - TOKENIZER"

    def __init__(self, out: str, tokenizer: str = "gpt2", val_share: float = 0.005) -> None:
        super().__init__()
        self.out, self.tokenizer, self.val_share = out, tokenizer, val_share

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Pass the documents on, their ids written. Raises UserError."""
        folder = Path(self.out) / PARTS
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"tokenizer-{rank:05d}"
        own.mkdir(exist_ok=True)
        options = PrepareOptions(sources=(), out=self.out, tokenizer=self.tokenizer, val_share=self.val_share)
        info, _ = vocabulary.make(options, SourceList(files=(), fingerprint="", description=""), own)
        words = tokenizers.load(own / vocabulary.FOLDER, info.name)
        assert words is not None
        dtype = dtype_for(words.vocab_size - 1)
        writers = {split: _PartWriter(folder, split, rank) for split in SPLITS}
        batch: list[bytes] = []
        size = empty = 0

        def flush() -> None:
            texts = [text for text in batch if text]
            keep = keep_of(hashes_of(texts), self.val_share)
            ids, lengths, _ = encode_batch(encode, words.separator, dtype, keep, texts)
            start = 0
            for split in SPLITS:
                mine = keep == _KEEP[split]
                count = int(lengths[mine].sum(dtype=np.int64))
                source = sum(len(text) for text, own in zip(texts, mine.tolist(), strict=True) if own)
                writers[split].append(ids[start : start + count], lengths[mine], source)
                start += count
                self.stat_update(f"{split}_tokens", value=count, unit="batch")
            batch.clear()

        encode = encoder_of(words)
        for document in data or ():
            text = document.text.encode("utf-8", "replace")
            empty += not text
            batch.append(text)
            size += len(text)
            if size >= _BATCH_BYTES:
                flush()
                size = 0
            yield document
        flush()
        splits = {split: writer.finish() for split, writer in writers.items()}
        part = Part(
            rank=rank, world_size=world_size, dtype=dtype, vocab_size=words.vocab_size, tokenizer=info,
            val_share=self.val_share, empty=empty, splits=splits,
        )  # fmt: skip
        disk.publish(folder / f"{rank:05d}.json", [json.dumps(part.to_json())])


class _PartWriter:
    """The ids of one split and the lengths of its documents; under their names when they are complete."""

    def __init__(self, folder: Path, split: str, rank: int) -> None:
        self.paths = {kind: folder / f"{split}-{rank:05d}.{kind}" for kind in ("ids", "lengths")}
        self.files = {kind: path.with_suffix(f".{kind}.new").open("wb") for kind, path in self.paths.items()}
        self.digests = {kind: hashlib.sha256() for kind in self.paths}
        self.tokens = self.documents = self.source_bytes = 0

    def append(self, ids: np.ndarray, lengths: np.ndarray, source_bytes: int) -> None:
        for kind, data in (("ids", ids.tobytes()), ("lengths", lengths.astype("<u4").tobytes())):
            self.files[kind].write(data)
            self.digests[kind].update(data)
        self.tokens, self.documents = self.tokens + len(ids), self.documents + len(lengths)
        self.source_bytes += source_bytes

    def finish(self) -> Written:
        for kind, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            Path(file.name).replace(self.paths[kind])
        return Written(
            tokens=self.tokens, documents=self.documents, source_bytes=self.source_bytes,
            ids_sha256=self.digests["ids"].hexdigest(), lengths_sha256=self.digests["lengths"].hexdigest(),
        )  # fmt: skip


class Shards(PipelineStep):
    """The parts of all tasks to shards and their index; run it with tasks=1, after Tokens."""

    name = "foretrain shards"
    type = "🔢 - TOKENIZER"

    def __init__(self, out: str, shard_tokens: int = DEFAULT_SHARD_TOKENS, keep_parts: bool = False) -> None:
        super().__init__()
        self.out, self.shard_tokens, self.keep_parts = out, shard_tokens, keep_parts

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Write shards and index. Raises UserError 'data.parts_…' where parts are missing or differ."""
        if rank == 0:
            index = merge(Path(self.out), self.shard_tokens, keep_parts=self.keep_parts)
            for name, split in index.splits.items():
                self.stat_update(f"{name}_tokens", value=split.tokens, unit="task")
                self.stat_update(f"{name}_documents", value=split.documents, unit="task")
        yield from data or ()


def merge(out: Path, shard_tokens: int = DEFAULT_SHARD_TOKENS, *, keep_parts: bool = False) -> DatasetIndex:
    """Cut the parts in `out` into shards; a merge that was killed begins again. Raises UserError 'data.parts_…'."""
    parts = read_parts(out / PARTS)
    first = parts[0]
    for path in (out / INDEX, *(p for split in SPLITS for p in out.glob(f"{split}-*.bin"))):
        path.unlink(missing_ok=True)
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
    (out / PROGRESS).mkdir()
    splits: dict[str, Split] = {}
    for split in SPLITS:
        writer = SplitWriter(out, split, first.dtype, shard_tokens, SplitState())
        try:
            for part in parts:
                _append(writer, out / PARTS, split, part)
            splits[split] = writer.finish()
        finally:
            writer.close()
    saved = out / PARTS / f"tokenizer-{first.rank:05d}" / vocabulary.FOLDER
    for path in saved.iterdir():
        if path.name != vocabulary.REQUEST:
            shutil.copyfile(path, out / path.name)
    digest = hashlib.sha256("".join(p.splits[s].ids_sha256 for p in parts for s in SPLITS).encode())
    source_bytes = sum(split.source_bytes for split in splits.values())
    index = DatasetIndex(
        dtype=first.dtype, vocab_size=first.vocab_size, tokenizer=first.tokenizer,
        source=Source(
            fingerprint=digest.hexdigest()[:32], description=f"a datatrove pipeline of {len(parts)} tasks",
            files=len(parts), source_bytes=source_bytes,
        ),
        settings=Settings(
            seed=0, shuffle_buffer=0, val_share=first.val_share, dedup=False, text_column="text",
            max_document_bytes=DEFAULT_DOCUMENT_BYTES, shard_tokens=shard_tokens,
        ),
        counts=Counts(empty=sum(part.empty for part in parts)), splits=splits,
    )  # fmt: skip
    disk.publish(out / INDEX, index_text(index))
    shutil.rmtree(out / PROGRESS)
    if not keep_parts:
        shutil.rmtree(out / PARTS)
    return index


def read_parts(folder: Path) -> list[Part]:
    """What every task says, in their order. Raises UserError where one is missing, or differs from the others."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Part.from_json(read_text(path)))
        except (OSError, ValueError) as error:
            raise UserError("data.bad_meta", path=str(path), reason=str(error).splitlines()[0][:200]) from None
    size = found[0].world_size if found else 1
    missing = sorted(set(range(size)) - {part.rank for part in found})
    if missing:
        raise UserError("data.parts_missing", path=str(folder), missing=missing[:20], count=size)
    for part in found:
        own = (part.world_size, part.tokenizer.sha256, part.val_share)
        if own != (size, found[0].tokenizer.sha256, found[0].val_share):
            raise UserError("data.parts_differ", path=str(folder), rank=part.rank)
    return found


def _append(writer: SplitWriter, folder: Path, split: str, part: Part) -> None:
    """One task's part, a few million tokens at a time, held against its digests."""
    known = part.splits[split]
    digests = {"ids": hashlib.sha256(), "lengths": hashlib.sha256()}
    paths = {kind: folder / f"{split}-{part.rank:05d}.{kind}" for kind in digests}
    left_bytes = known.source_bytes
    try:
        with paths["ids"].open("rb") as ids, paths["lengths"].open("rb") as lengths:
            for count in _counts(lengths, digests["lengths"]):
                data = ids.read(int(count.sum(dtype=np.int64)) * writer.item_bytes)
                digests["ids"].update(data)
                if len(data) != int(count.sum(dtype=np.int64)) * writer.item_bytes:
                    break
                writer.append(np.frombuffer(data, f"<u{writer.item_bytes}"), count, left_bytes)
                left_bytes = 0
    except OSError as error:
        raise UserError("data.unreadable", path=error.filename or str(folder), reason=error.strerror or "") from None
    for kind, digest in digests.items():
        if digest.hexdigest() != getattr(known, f"{kind}_sha256"):
            raise UserError("data.bad_digest", path=str(paths[kind]))


def _counts(lengths: Any, digest: Any) -> Iterator[np.ndarray]:
    """Lengths of documents, as many at a time as make a piece; one at least."""
    while data := lengths.read(4 * 2**16):
        digest.update(data)
        counts = np.frombuffer(data, "<u4")
        pieces = np.cumsum(counts, dtype=np.int64) // _PIECE_TOKENS
        yield from np.split(counts, np.flatnonzero(np.diff(pieces)) + 1)
