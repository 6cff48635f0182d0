"""A tokenizing worker process: batches of documents in, ids with a separator after each document out.

The tokenizer is loaded from a folder where the parent saved it, so no worker needs a network.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.base.errors import UserError
from foretrain.data import tokenizer as tokenizers
from foretrain.data.prepare.ipc import error_frame, ignore_interrupts, receive, send
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, JsonTokenizer, TiktokenTokenizer, Tokenizer

KEEP_TRAIN, KEEP_VAL = 1, 2
_PIECE_CHARACTERS = 2**18
# A letter, then a space and a letter: every pattern of GPT-2's kind ends a word there, so ids do not change by a cut.
_SAFE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
# Of those patterns the texts begin alike; others are encoded whole.
_CUTTABLE = ("'(?:[sdmt]|ll|ve|re)", "'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?")

Encode = Callable[[list[bytes]], list[np.ndarray]]


def pieces(text: str, size: int = _PIECE_CHARACTERS) -> list[str]:
    """The text cut where no token can reach across, into pieces of about `size` characters."""
    made, start = [], 0
    while len(text) - start > size and (match := _SAFE.search(text, start + size)):
        made.append(text[start : match.start()])
        start = match.start()
    return [*made, text[start:]]


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """Documents to arrays of ids, without separators; long documents go piece by piece where that is safe."""
    if isinstance(tokenizer, ByteTokenizer):
        return lambda documents: [np.frombuffer(document, np.uint8) for document in documents]
    if isinstance(tokenizer, TiktokenTokenizer):
        encoding: Any = tokenizer._encoding
        cuttable = str(encoding._pat_str).startswith(_CUTTABLE)

        def encode(text: str) -> np.ndarray:
            parts = pieces(text) if cuttable else [text]
            made = [encoding.encode_to_numpy(part, disallowed_special=()) for part in parts]
            return made[0] if len(made) == 1 else np.concatenate(made)

        return lambda documents: [encode(document.decode()) for document in documents]
    if isinstance(tokenizer, JsonTokenizer):
        return lambda documents: _encode_json(tokenizer, documents, cuttable=isinstance(tokenizer, BpeTokenizer))
    return lambda documents: [np.array(tokenizer.encode(document), dtype=np.int64) for document in documents]


def _encode_json(tokenizer: JsonTokenizer, documents: list[bytes], *, cuttable: bool) -> list[np.ndarray]:
    """A few pieces at a time: the library keeps about a hundred bytes a token while it works."""
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
    """(all ids with separators, tokens of each document, how many documents hold the separator as text).

    keep: (documents) of 0 (left out: no tokens), KEEP_TRAIN or KEEP_VAL; the ids are those of the train documents and
    then those of the validation documents. Raises UserError 'data.id_overflow' for an id that the dtype cannot hold.
    """
    limit = int(np.iinfo(np.dtype(dtype)).max)
    made: dict[int, np.ndarray] = {}
    chosen = np.flatnonzero(keep)
    made = dict(zip(chosen.tolist(), encode([documents[i] for i in chosen]), strict=True))
    lengths = np.zeros(len(documents), dtype=np.uint32)
    inside = 0
    parts: list[np.ndarray] = []
    end = np.array([separator], dtype=np.result_type(np.min_scalar_type(separator), *(made[i].dtype for i in made)))
    for split in (KEEP_TRAIN, KEEP_VAL):
        for i in np.flatnonzero(keep == split).tolist():
            ids = made[i]
            lengths[i] = len(ids) + 1
            parts += [ids, end]
    if not parts:
        return np.zeros(0, dtype=dtype), lengths, 0
    wide = np.concatenate(parts)
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > limit:
        worst = high if high > limit else low
        raise UserError("data.id_overflow", id=worst, dtype=dtype, limit=limit)
    if int((wide == separator).sum()) > len(made):
        inside = sum(bool((ids == separator).any()) for ids in made.values())
    return wide.astype(dtype), lengths, inside


def main(folder: str, name: str, dtype: str) -> None:
    """Answer frames until the pipe ends: keep, lengths, texts in; lengths of documents and ids out."""
    ignore_interrupts()
    source, pipe = sys.stdin.buffer, sys.stdout.buffer
    try:
        tokenizer = tokenizers.load(Path(folder), name)
        assert tokenizer is not None
        encode, separator = encoder_of(tokenizer), tokenizer.separator
        while (frame := receive(source)) is not None:
            count, payload = frame[0]["documents"], memoryview(frame[1])
            keep = np.frombuffer(payload[:count], np.uint8)
            lengths = np.frombuffer(payload[count : 5 * count], "<u4").tolist()
            documents, at = [], 5 * count
            for length in lengths:
                documents.append(bytes(payload[at : at + length]))
                at += length
            ids, tokens, inside = encode_batch(encode, separator, f"<{dtype[0]}{int(dtype[4:]) // 8}", keep, documents)
            send(pipe, {"type": "ids", "inside": inside}, tokens.astype("<u4").tobytes(), ids.tobytes())
    except UserError as error:
        send(pipe, error_frame(error))
    except MemoryError:
        send(pipe, {"type": "error", "id": "data.worker_memory", "values": {}})
    except BrokenPipeError:
        sys.stdout = None
