"""Texts that are scored: files, and the validation data of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrain.app.evaluating.asked import VALIDATION_TOKENS, Listen
from foretrain.app.evaluating.subjects import Subject
from foretrain.base.errors import UserError
from foretrain.base.safe_read import read_bytes
from foretrain.base.units import MIB
from foretrain.data.token_bytes import token_bytes
from foretrain.data.token_sources import readers
from foretrain.data.tokenizer import document_end
from foretrain.evaluation import windows
from foretrain.evaluation.record import TextScore
from foretrain.training.store import RunRecord, now

MOST_BYTES = 256 * MIB  # of a text, which is tokenized as a whole


@dataclass(frozen=True)
class Document:
    """A text: its bytes, or ids that are tokens already, of which the first is context only. `complete`: all of it."""

    name: str
    sha256: str
    data: bytes = b""
    ids: np.ndarray | None = None
    complete: bool = True


def read(path: Path) -> Document:
    """A file of UTF-8 text. Raises UserError where it is none."""
    try:
        data = read_bytes(path, MOST_BYTES)
        data.decode("utf-8")
    except OSError as error:
        raise UserError("data.text_unreadable", path=str(path), reason=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise UserError(
            "data.text_not_utf8", path=str(path), at=error.start, byte=f"{error.object[error.start]:02x}"
        ) from None
    if not data:
        raise UserError("data.text_empty", path=str(path))
    return Document(path.name, hashlib.sha256(data).hexdigest(), data)


def validation(record: RunRecord, subject: Subject, tokens: int | None) -> list[Document]:
    """The validation data of a run, of a mixture that of each part; of long ones the beginning. Raises UserError."""
    info = record.dataset
    found = []
    for part, reader in zip([p.dataset for p in info.parts] or [info], readers(info, "val"), strict=True):
        count = min(reader.tokens, (tokens or VALIDATION_TOKENS) + 1)
        ids = np.frombuffer(reader.read(0, count), dtype=f"<u{reader.item_bytes}").astype(np.int64)
        digest = hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
        found.append(Document(f"{part.name}/val", digest, ids=ids, complete=count == reader.tokens))
    return found


def scored(subject: Subject, document: Document, stride: int | None, tokens: int | None, listen: Listen) -> TextScore:
    """How well the model predicts it. Raises UserError where the two do not belong together."""
    context = subject.model.context_tokens
    stride = max(1, context // 2) if stride is None else stride
    if stride > context:
        raise UserError("usage.stride", stride=stride, context=context)
    sizes = token_bytes(subject.words)
    ids = _ids(subject, document)
    whole = document.complete and (tokens is None or len(ids) - 1 <= tokens)
    ids = ids if tokens is None else ids[: tokens + 1]
    _check(subject, document, ids)
    separator = None if document.data else document_end(subject.words)
    summed = windows.score(
        subject.model, ids, sizes, stride=stride, skip=separator,
        tell=lambda done, total: listen("text_progress", {"name": document.name, "done": done, "total": total}),
    )  # fmt: skip
    size_bytes = _size(subject, document, ids, sizes, whole) or int(summed.byte_counts.sum())
    return TextScore(
        text=document.name, sha256=document.sha256, size_bytes=size_bytes, tokens=summed.tokens, loss=summed.loss,
        bits_per_byte=summed.bits_per_byte(size_bytes), standard_error=summed.standard_error(size_bytes),
        windows=len(summed.nats), context_tokens=context, stride_tokens=stride, whole=whole, device=subject.device,
        dtype="float32", at=now(),
    )  # fmt: skip


def _ids(subject: Subject, document: Document) -> np.ndarray:
    """The ids, with what the first one is predicted from before them."""
    if document.ids is not None:
        return document.ids
    own = np.array(list(subject.words.encode(document.data)), dtype=np.int64)
    return own if subject.begins is None else np.concatenate([[subject.begins], own])


def _check(subject: Subject, document: Document, ids: np.ndarray) -> None:
    if len(ids) < 2:
        raise UserError("data.text_too_short", path=document.name, tokens=len(ids))
    largest, size = int(ids.max()), subject.model.vocab_size
    if largest >= size:
        raise UserError("data.id_beyond_vocab", path=document.name, id=largest, vocab_size=size)


def _size(subject: Subject, document: Document, ids: np.ndarray, sizes: Sequence[int], whole: bool) -> int | None:
    """The bytes of a whole file that were predicted; None: as its tokens have them."""
    if not document.data or not whole:
        return None
    return len(document.data) - (sizes[ids[0]] if subject.begins is None else 0)
