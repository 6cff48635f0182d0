"""What the tests of `foretrain prepare` share: sources, a small tiktoken encoding, a plain reference, bad files."""

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.base.errors import UserError
from foretrain.data import corpus
from foretrain.data.prepare.engine import Outcome, prepare
from foretrain.data.prepare.sources import PrepareOptions
from foretrain.data.tokenizer import BpeTokenizer

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""


@cache
def stdlib_texts(count: int = 60) -> tuple[str, ...]:
    """Sources of the standard library, the same on every run of one Python."""
    texts = []
    for document in corpus.documents("train"):
        if len(document) < 20_000 and document.strip():
            texts.append(document.decode("utf-8", "replace"))
        if len(texts) == count:
            break
    return tuple(texts)


def texts(count: int, seed: int = 0) -> list[str]:
    """Short documents of many lengths, with umlauts, emoji and lines; all different."""
    made = random.Random(seed)
    words = [word for text in stdlib_texts(20) for word in text.split()[:200]] + ["Ä ö ü ß", "日本語", "🙂🙂", "naïve"]
    return [
        f"{i} " + " ".join(made.choices(words, k=made.randint(1, 120))) + ("\n" if i % 3 else "") for i in range(count)
    ]


@cache
def bpe_text(size: int = 600) -> str:
    return BpeTokenizer.train((text.encode() for text in stdlib_texts(20)), size).text


def ranks_of(text: str) -> dict[bytes, int]:
    from foretrain.data.hf_tokenizer import byte_characters

    bytes_of = {character: byte for byte, character in byte_characters().items()}
    vocabulary = json.loads(text)["model"]["vocab"]
    tokens = sorted((id, token) for token, id in vocabulary.items() if token != BpeTokenizer.SEPARATOR)
    return {bytes(bytes_of[c] for c in token): rank for rank, (_, token) in enumerate(tokens)}


def toy_encoding(pattern: str = GPT2_PATTERN, name: str = "toy") -> Any:
    """A tiktoken encoding from a vocabulary that was trained here, with GPT-2's rules."""
    import tiktoken

    ranks = ranks_of(bpe_text())
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


def write_jsonl(path: Path, rows: Sequence[Any], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, column: row}) + "\n" for i, row in enumerate(rows)), "utf-8")
    return path


def write_kind(path: Path, rows: Sequence[str]) -> Path:
    """The rows as JSON lines, packed or not, or as Parquet, by the name of the file."""
    plain = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": list(range(len(rows))), "text": list(rows)}), path, row_group_size=37)
    elif path.suffix == ".zst":
        import pyarrow as pa

        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(plain)
    else:
        path.write_bytes(gzip.compress(plain, mtime=0) if path.suffix == ".gz" else plain)
    return path


def options(*sources: Path | str, out: str = "out", **changes: Any) -> PrepareOptions:
    values = {"tokenizer": "byte", "workers": 1, "val_share": 0.1, **changes}
    return PrepareOptions(sources=tuple(str(source) for source in sources), out=out, **values)


def run(*sources: Path | str, **changes: Any) -> Outcome:
    return prepare(options(*sources, **changes))


def tokens_of(folder: Path | str, split: str, dtype: str = "uint16") -> np.ndarray:
    parts = [np.fromfile(path, dtype=dtype) for path in sorted(Path(folder).glob(f"{split}-*.bin"))]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def expected(
    rows: Sequence[str], encode: Callable[[str], Sequence[int]], separator: int, val_share: float = 0.1
) -> dict[str, list[int]]:
    """What the shards must hold, the plain way: one document after the other, split by the hash of its text."""
    made: dict[str, list[int]] = {"train": [], "val": []}
    for row in rows:
        number = int.from_bytes(hashlib.sha256(row.encode()).digest()[8:16], "little")
        made["val" if number / 2**64 < val_share else "train"] += [*encode(row), separator]
    return made


def digests(folder: Path | str) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).iterdir()) if p.is_file()}


# -- the engine in one process, and what can go wrong in it ---------------------------------------------------


def frames_of(job: Any) -> list[Any]:
    from foretrain.base.processes import Frame
    from foretrain.data.prepare.reader import serve

    frames: list[Frame] = []
    serve(job, lambda value, *parts: frames.append(Frame(value, b"".join(parts))))
    return frames


class InlineReader:
    """The reader's frames without a process of its own."""

    def __init__(self, job: Any) -> None:
        self.frames = iter(frames_of(job))

    def next(self, timeout_s: float) -> Any:
        return next(self.frames)

    def end(self) -> None:
        pass


class InlineWorkers:
    def __init__(self, children: list[Any], folder: Path, name: str, dtype: str) -> None:
        from foretrain.data.prepare.encode import encoder_of
        from foretrain.data.tokenizer import ByteTokenizer

        assert name == "byte"
        self.encoder = encoder_of(ByteTokenizer())

    def encode(self, keep: np.ndarray, lengths: np.ndarray, text: memoryview) -> Any:
        return self._answer({"documents": len(keep)}, b"".join((keep.tobytes(), lengths.tobytes(), text)))

    def read(self, part: dict[str, Any]) -> Any:
        return self._answer({"range": part}, b"")

    def _answer(self, header: dict[str, Any], payload: bytes) -> Any:
        from concurrent.futures import Future

        from foretrain.data.prepare.encode import answer
        from foretrain.data.prepare.pool import Encoded

        future: Future[Any] = Future()
        try:
            head, *parts = answer(self.encoder, 0, "<u2", header, payload)
            future.set_result(Encoded.of(head, b"".join(parts), np.dtype("<u2")))
        except UserError as error:
            future.set_exception(error)
        return future

    def end(self) -> None:
        pass


def in_one_process(monkeypatch: Any) -> None:
    """The engine as it is, without processes around it."""
    from foretrain.data.prepare import engine

    monkeypatch.setattr(engine, "started", lambda count: nullcontext([]))
    monkeypatch.setattr(engine, "Reader", InlineReader)
    monkeypatch.setattr(engine, "Workers", InlineWorkers)


def small_ranges(monkeypatch: Any, size: int = 3000) -> None:
    """What one worker reads at a time is a few lines."""
    from foretrain.data.prepare import encode as ranges

    monkeypatch.setattr(ranges, "BUFFER", size)
    monkeypatch.setattr(ranges, "TAIL_BYTES", size // 2)


class Killed(BaseException):
    """Stands for kill -9: nothing after it is done but closing files."""


class Disk:
    """Counts the operations that change the disk, and at the one that is wanted fails or kills."""

    def __init__(self, monkeypatch: Any, *, kill_at: int | None = None, room_bytes: int | None = None) -> None:
        import os

        from foretrain.data.prepare import writer

        self.count, self.kill_at, self.room = 0, kill_at, room_bytes
        write, fsync, replace = os.write, os.fsync, Path.replace

        def guarded(call: Callable[..., Any], cut: Callable[..., Any] | None = None) -> Callable[..., Any]:
            def wrapped(*args: Any, **values: Any) -> Any:
                self.count += 1
                if self.count == self.kill_at:
                    if cut is not None:
                        cut(*args)
                    raise Killed
                return call(*args, **values)

            return wrapped

        def bounded(handle: int, data: memoryview) -> int:
            if self.room is not None:
                if self.room <= 0:
                    raise OSError(28, "No space left on device")
                data = data[: self.room]
                self.room -= len(data)
            return write(handle, data)

        monkeypatch.setattr(
            writer, "_write", guarded(bounded, lambda handle, data: write(handle, data[: len(data) // 2]))
        )
        monkeypatch.setattr(os, "fsync", guarded(fsync))
        monkeypatch.setattr(Path, "replace", guarded(replace))
