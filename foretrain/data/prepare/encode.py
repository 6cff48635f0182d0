"""A tokenizing worker: documents in, ids with separators out. It loads the tokenizer from a folder of the parent."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.base.errors import UserError
from foretrain.base.processes import Parent
from foretrain.base.records import Record
from foretrain.data import tokenizer as tokenizers
from foretrain.data.prepare.formats import documents
from foretrain.data.prepare.ipc import limited_memory, telling
from foretrain.data.prepare.opened import BUFFER, Format, OpenFile, Place, SourceFile, reason_of
from foretrain.data.prepare.reader import MEMORY_BYTES, Job, Position, hashes_of
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, JsonTokenizer, TiktokenTokenizer, Tokenizer

TAIL_BYTES = 2**16


class Range(Record):
    """The lines of a file from byte `offset` up to byte `end`, `val_share` of them, by their hash, for validation."""

    file: SourceFile
    offset: int
    end: int
    text_column: str
    split_documents: str
    max_document_bytes: int
    skip_bad: bool
    val_share: float

    @property
    def format(self) -> Format:
        return Format(self.text_column, self.split_documents, self.max_document_bytes, self.skip_bad)


def can_serve(job: Job, *, dedup: bool) -> bool:
    """Return whether workers can read this source: plain JSON lines on this machine, in their own order, no `dedup`."""
    plain = all(file.kind == "jsonl" and not file.compression and not file.remote for file in job.files)
    return plain and not job.shuffle_buffer and not dedup


class Ranges:
    def __init__(self, job: Job, val_share: float) -> None:
        self.job, self.val_share = job, val_share
        self.file, self.offset, self.window = job.position.file, job.position.offset, job.position.window
        self.finished_bytes = sum(file.size_bytes or 0 for file in job.files[: self.file])
        self._opened: OpenFile | None = None

    def next(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Return the next frame: a range, or the end. Raises UserError 'data.source_…'."""
        while self.file < len(self.job.files):
            if self._opened is None:
                self._opened = OpenFile(self.job.files[self.file])
            if frame := self._range(self._opened):
                return frame, b""
            self._opened.close()
            self.finished_bytes += self.job.files[self.file].size_bytes or 0
            self._opened, self.offset, self.file = None, 0, self.file + 1
        return {"type": "end"}, b""

    def _range(self, opened: OpenFile) -> dict[str, Any] | None:
        start = self.offset
        if start >= (opened.file.size_bytes or 0):
            return None
        try:
            self.offset = _end_of_line(opened.raw, start + BUFFER, opened.file.size_bytes or 0)
        except OSError as error:
            raise UserError("data.source_corrupt", path=opened.file.path, reason=reason_of(error)) from None
        self.window += 1
        part = Range(
            file=opened.file, offset=start, end=self.offset, text_column=self.job.text_column,
            split_documents=self.job.split_documents, max_document_bytes=self.job.max_document_bytes,
            skip_bad=self.job.skip_bad, val_share=self.val_share,
        )  # fmt: skip
        after = Position(file=self.file, offset=self.offset, window=self.window)  # its reader counts the lines
        return {
            "type": "range", "range": part.to_json(), "position": after.to_json(),
            "read_bytes": self.finished_bytes + self.offset,
        }  # fmt: skip

    def end(self) -> None:
        if self._opened is not None:
            self._opened.abandon()
            self._opened = None


def _end_of_line(raw: Any, wanted: int, size: int) -> int:
    if wanted >= size:
        return size
    raw.seek(wanted - TAIL_BYTES)
    tail = raw.read(TAIL_BYTES)
    if (at := tail.rfind(b"\n")) >= 0:
        return wanted - TAIL_BYTES + at + 1
    raw.seek(wanted)
    while piece := raw.read(BUFFER):
        if (at := piece.find(b"\n")) >= 0:
            return wanted + at + 1
        wanted += len(piece)
    return size


@dataclass
class Lines:
    documents: list[bytes]
    records: int = 0
    empty: int = 0
    bad: int = 0
    replaced: int = 0


def read(part: Range) -> Lines:
    """Parse the documents of a range with limited memory. Raises UserError 'data.source_…'; lines count from it."""
    found = Lines([])
    before = Place(min(part.offset, 1), part.offset)  # the first line of a file alone is the first
    at = before
    opened = OpenFile(part.file)
    try:
        with limited_memory(MEMORY_BYTES + 4 * part.max_document_bytes):
            for document in documents(opened, part.format, before):
                at = document.place
                if document.text is not None:
                    found.documents.append(document.text)
                    found.replaced += document.replaced
                elif document.bad:
                    found.bad += 1
                else:
                    found.empty += 1
                if at.offset >= part.end:
                    break
        opened.close()
    except UserError as error:
        raise with_line_offset(error, -before.records) from None
    finally:
        opened.abandon()
    if at.offset != part.end:  # the same size and time as before, and other lines
        raise UserError("data.source_changed", path=part.file.path)
    found.records = at.records - before.records
    return found


def with_line_offset(error: UserError, before: int) -> UserError:
    named = {key: error.values[key] + before for key in ("line", "number") if key in error.values}
    return UserError(error.id, **{**error.values, **named})


KEEP_TRAIN, KEEP_VAL = 1, 2
_PIECE_CHARACTERS = 2**18
# A letter, then a space and a letter: every pattern of GPT-2's kind ends a word there, so a cut changes no ids.
_SAFE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
# Those patterns have such beginnings; others are encoded whole.
_CUTTABLE = ("'(?:[sdmt]|ll|ve|re)", "'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?")

Encode = Callable[[list[bytes]], Iterable[np.ndarray]]


def pieces(text: str, size: int = _PIECE_CHARACTERS) -> list[str]:
    made, start = [], 0
    while len(text) - start > size and (match := _SAFE.search(text, start + size)):
        made.append(text[start : match.start()])
        start = match.start()
    return [*made, text[start:]]


def encoder_of(tokenizer: Tokenizer) -> Encode:
    if isinstance(tokenizer, ByteTokenizer):
        return lambda documents: [np.frombuffer(document, np.uint8) for document in documents]
    if isinstance(tokenizer, TiktokenTokenizer):
        encoding: Any = tokenizer._encoding
        cuttable = str(encoding._pat_str).startswith(_CUTTABLE)

        def encode(text: str) -> np.ndarray:
            parts = pieces(text) if cuttable else [text]
            made = [encoding.encode_to_numpy(part, disallowed_special=()) for part in parts]
            return made[0] if len(made) == 1 else np.concatenate(made)

        return lambda documents: (encode(document.decode()) for document in documents)
    if isinstance(tokenizer, JsonTokenizer):
        return lambda documents: _encode_json(tokenizer, documents, cuttable=isinstance(tokenizer, BpeTokenizer))
    return lambda documents: [np.array(tokenizer.encode(document), dtype=np.int64) for document in documents]


def _encode_json(tokenizer: JsonTokenizer, documents: list[bytes], *, cuttable: bool) -> list[np.ndarray]:
    """Encode a few pieces at a time: the library takes about a hundred bytes per token meanwhile."""
    made: list[np.ndarray] = []
    held: list[str] = []
    size = 0

    def flush() -> None:
        nonlocal size
        made.extend(np.array(ids, dtype=np.uint32) for ids in tokenizer.encode_many(held))
        held.clear()
        size = 0

    counts = []
    for document in documents:
        parts = pieces(document.decode()) if cuttable else [document.decode()]
        counts.append(len(parts))
        for part in parts:
            held.append(part)
            size += len(part)
            if size >= _PIECE_CHARACTERS:
                flush()
    flush()
    joined, at = [], 0
    for count in counts:
        joined.append(made[at] if count == 1 else np.concatenate(made[at : at + count]))
        at += count
    return joined


def encode_batch(
    encode: Encode, separator: int, dtype: str, keep: np.ndarray, documents: list[bytes]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (all ids with separators, tokens of each document, how many documents hold the separator as text). keep:
    (documents) of 0 (left out), KEEP_TRAIN or KEEP_VAL; train comes first. Raises UserError."""
    limit = int(np.iinfo(np.dtype(dtype)).max)
    order = [i for split in (KEEP_TRAIN, KEEP_VAL) for i in np.flatnonzero(keep == split).tolist()]
    lengths = np.zeros(len(documents), dtype=np.uint32)
    end, inside = np.array([separator], dtype=dtype), 0
    parts: list[np.ndarray] = []
    # One document at a time stays in the processor's cache, and frees its memory.
    for i, ids in zip(order, encode([documents[i] for i in order]), strict=True):
        lengths[i] = len(ids) + 1
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high > limit:
                raise UserError("data.id_overflow", id=high if high > limit else low, dtype=dtype, limit=limit)
            inside += low <= separator <= high and bool((ids == separator).any())
        parts += [ids.astype(dtype), end]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype), lengths, inside


def keep_of(hashes: np.ndarray, val_share: float) -> np.ndarray:
    # The second half of a hash decides, so equal texts are always in the same one.
    return np.where(hashes[:, 1] / 2.0**64 < val_share, KEEP_VAL, KEEP_TRAIN).astype(np.uint8)


def _documents_of_frame(header: dict[str, Any], payload: bytes) -> tuple[Lines, np.ndarray]:
    if "range" in header:
        part = Range.model_validate(header["range"])
        lines = read(part)
        return lines, keep_of(hashes_of(lines.documents), part.val_share)
    count, view = header["documents"], memoryview(payload)
    documents, at = [], 5 * count
    for length in np.frombuffer(view[count : 5 * count], "<u4").tolist():
        documents.append(bytes(view[at : at + length]))
        at += length
    return Lines(documents), np.frombuffer(view[:count], np.uint8)


def answer(encode: Encode, separator: int, dtype: str, header: dict[str, Any], payload: bytes) -> tuple[Any, ...]:
    lines, keep = _documents_of_frame(header, payload)
    ids, tokens, inside = encode_batch(encode, separator, dtype, keep, lines.documents)
    lengths = np.array([len(document) for document in lines.documents], "<u4")
    head = {
        "type": "ids", "documents": len(keep), "separators": inside, "records": lines.records,
        "empty": lines.empty, "bad": lines.bad, "replaced": lines.replaced,
    }  # fmt: skip
    return head, lengths.data, tokens.astype("<u4").data, ids.data, keep.data


def main(parent: Parent) -> None:
    def work() -> None:
        if (first := parent.receive()) is None:
            return
        tokenizer = tokenizers.load(Path(first.value["folder"]), first.value["name"])
        assert tokenizer is not None
        encode = encoder_of(tokenizer)
        while (frame := parent.receive()) is not None:
            parent.send(*answer(encode, tokenizer.separator, first.value["dtype"], *frame))

    telling(parent, work, UserError("data.worker_memory"))
