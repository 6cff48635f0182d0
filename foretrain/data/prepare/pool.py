"""The reader process with its frames in a queue, and the tokenizing workers with a thread each."""

import contextlib
import json
import queue
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.base.errors import UserError
from foretrain.base.processes import Child, Frame, ProcessExit
from foretrain.data.prepare.ipc import raised, start
from foretrain.data.prepare.reader import HASH_BYTES, Job, Position

_QUEUED = 2


@dataclass
class Batch:
    """Documents from the reader: lengths (n) in bytes, hashes (n, 2), their texts one after the other."""

    lengths: np.ndarray
    hashes: np.ndarray
    text: memoryview
    position: Position
    read_bytes: int

    @classmethod
    def of(cls, header: dict[str, Any], payload: bytes) -> "Batch":
        n, view = header["documents"], memoryview(payload)
        hashes_end = 4 * n + HASH_BYTES * n
        return cls(
            lengths=np.frombuffer(view[: 4 * n], "<u4"),
            hashes=np.frombuffer(view[4 * n : hashes_end], "<u8").reshape(n, 2),
            text=view[hashes_end:],
            position=Position.model_validate(header["position"]),
            read_bytes=header["read_bytes"],
        )


class Reader:
    def __init__(self, job: Job) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="foretrain-", delete=False) as file:
            json.dump(job.to_json(), file)
        self._job_file = Path(file.name)
        inherited = any(source.kind == "stdin" for source in job.files)
        stdin = None if inherited else subprocess.DEVNULL
        self.child = start("reader", file.name, stdin=stdin, most_waiting=_QUEUED)
        self._path = job.files[0].path

    def next(self, timeout_s: float) -> Frame | None:
        """Return the next frame, or None where there is none within the time. Raises UserError 'data.source_…'."""
        found = raised(self.child.receive(timeout_s))
        if isinstance(found, ProcessExit):
            raise UserError("data.source_reader_died", path=self._path, code=found.code)
        if found is not None and found.value["type"] == "file":
            self._path = found.value["path"]
        return found

    def end(self) -> None:
        self.child.end()
        self._job_file.unlink(missing_ok=True)


@dataclass
class Encoded:
    """Documents as ids, train before validation; of each, (n): bytes, tokens, keep (its split), 0 where left out."""

    lengths: np.ndarray
    tokens: np.ndarray
    ids: np.ndarray
    keep: np.ndarray
    separators: int  # documents that hold the separator as text
    records: int = 0  # lines of a range, and how many of them hold no document
    empty: int = 0
    bad: int = 0
    replaced: int = 0

    @classmethod
    def of(cls, header: dict[str, Any], payload: bytes, dtype: np.dtype) -> "Encoded":
        n, view = header["documents"], memoryview(payload)
        return cls(
            lengths=np.frombuffer(view[: 4 * n], "<u4"), tokens=np.frombuffer(view[4 * n : 8 * n], "<u4"),
            ids=np.frombuffer(view[8 * n : len(view) - n], dtype), keep=np.frombuffer(view[len(view) - n :], np.uint8),
            **{name: header[name] for name in ("separators", "records", "empty", "bad", "replaced")},
        )  # fmt: skip


@contextlib.contextmanager
def started(count: int) -> Iterator[list[Child]]:
    children = [start("encode") for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.end()


class Workers:
    def __init__(self, children: list[Child], folder: Path, name: str, dtype: str) -> None:
        self.dtype, self.children = np.dtype(f"<{dtype[0]}{int(dtype[4:]) // 8}"), children
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for child in children:
            child.send({"folder": str(folder), "name": name, "dtype": self.dtype.str})
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(len(children))

    def encode(self, keep: np.ndarray, lengths: np.ndarray, text: memoryview) -> "Future[Encoded]":
        """Ask one of them. keep, lengths: (n); the result raises UserError where that worker failed."""
        keep = keep.astype(np.uint8)
        return self._threads.submit(self._ask, {"documents": len(keep)}, keep.tobytes(), lengths.tobytes(), text)

    def read(self, part: dict[str, Any]) -> "Future[Encoded]":
        """Let one of them read a Range, and encode it; the result raises UserError also where the file is bad."""
        return self._threads.submit(self._ask, {"range": part})

    def _ask(self, header: dict[str, Any], *parts: bytes | memoryview) -> Encoded:
        child = self._idle.get()
        try:
            child.send(header, *parts)
            answer = raised(child.receive())
            if not isinstance(answer, Frame):
                raise UserError("data.worker_died", code=answer.code if answer else 0)
        finally:
            self._idle.put(child)  # an ended one too: its next caller must not wait for ever
        return Encoded.of(*answer, self.dtype)

    def end(self) -> None:
        for child in self.children:
            child.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self.children:
            child.end()
