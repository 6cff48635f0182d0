"""The reader process with its frames in a queue, and the tokenizing workers with a thread each."""

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.base.errors import UserError
from foretrain.data.prepare.ipc import Child, send
from foretrain.data.prepare.reader import HASH_BYTES, Job, Position

_QUEUED = 2


@dataclass
class Batch:
    """Documents as the reader sent them: lengths (n) in bytes, hashes (n, 2), their texts one after the other."""

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
    """The reader process. `next` gives its frames in order and raises what it met."""

    def __init__(self, job: Job) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="foretrain-", delete=False) as file:
            json.dump(job.to_json(), file)
        self._job_file = Path(file.name)
        inherited = any(source.kind == "stdin" for source in job.files)
        self.child = Child("reader", file.name, stdin=None if inherited else subprocess.DEVNULL)
        self._path = job.files[0].path
        self._frames: queue.Queue[Any] = queue.Queue(_QUEUED)
        self._ended = threading.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while not self._ended.is_set():
            try:
                frame: Any = self.child.next()
            except UserError as error:
                frame = error
            while not self._ended.is_set():
                try:
                    self._frames.put(frame, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if frame is None or isinstance(frame, UserError) or frame[0]["type"] == "end":
                return

    def next(self, timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
        """The next frame, or None where there is none within the time. Raises UserError 'data.source_…'."""
        try:
            frame = self._frames.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(frame, UserError):
            raise frame
        if frame is None:
            raise UserError("data.source_reader_died", path=self._path, code=self.child.end())
        if frame[0]["type"] == "file":
            self._path = frame[0]["path"]
        return frame

    def end(self) -> None:
        self._ended.set()
        self.child.process.kill()
        self.child.end()
        self._job_file.unlink(missing_ok=True)


@dataclass
class Encoded:
    """Documents as ids: those of the train documents, then those of validation.

    (n) of each document: lengths in bytes, tokens (0 where it is left out), keep (its split, 0 where it is left out).
    """

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
    """Processes that will be workers: they import while their tokenizer is found, and end with this."""
    children = [Child("encode") for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.end()


class Workers:
    """Tokenizing processes, with the tokenizer that is saved in `folder`; `encode` and `read` answer with a Future."""

    def __init__(self, children: list[Child], folder: Path, name: str, dtype: str) -> None:
        self.dtype, self.children = np.dtype(f"<{dtype[0]}{int(dtype[4:]) // 8}"), children
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for child in children:
            assert child.process.stdin is not None
            with contextlib.suppress(OSError):  # one that has died is told where it is asked
                send(child.process.stdin, {"folder": str(folder), "name": name, "dtype": self.dtype.str})  # type: ignore[arg-type]
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
            answer = child.ask(header, *parts)
            if answer is None:
                raise UserError("data.worker_died", code=child.process.wait())
        finally:
            self._idle.put(child)  # a dead one too: who asks it next must not wait for ever
        return Encoded.of(*answer, self.dtype)

    def end(self) -> None:
        """Stop them all; what they work on is lost."""
        for child in self.children:
            child.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self.children:
            child.end()
