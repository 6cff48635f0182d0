"""A file that is read, unpacked within limits, and what is read from it: documents and their places."""

import gzip
import io
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.base.errors import UserError
from foretrain.base.installation import need_extra
from foretrain.data.prepare.remote import RemoteFile
from foretrain.data.prepare.source_file import SourceFile

# A file that unpacks to this many times its size, and to more than this, is taken for a bomb: text packs 3 to 10 fold.
BOMB_RATIO, BOMB_BYTES = 500, 256 * 2**20

BUFFER = 2**20


@dataclass(frozen=True)
class Format:
    """How documents are found in files."""

    text_column: str
    split_documents: str  # file, lines, blank-lines, or a text that stands between documents
    max_document_bytes: int
    skip_bad: bool


@dataclass(frozen=True)
class Place:
    """After `records` documents or rows of a file, of which an uncompressed one goes on at byte `offset`."""

    records: int = 0
    offset: int = 0


@dataclass
class Document:
    """UTF-8 text; None for an empty one, `bad` for one that is left out on request."""

    text: bytes | None
    place: Place
    replaced: bool = False
    bad: bool = False


class OpenFile:
    """A file's bytes, unpacked, with what was read of it so far."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.raw: Any = None
        self._stream: Any = None
        self.unpacked: _Unpacked | None = None
        try:
            if file.kind == "stdin":
                self.raw = os.fdopen(0, "rb", buffering=0, closefd=False)
            elif file.remote:
                self.raw = RemoteFile(file.path, file.size_bytes or 0)
            else:
                self.raw = Path(file.path).open("rb", buffering=0)  # noqa: SIM115  closed by `abandon`
        except OSError as error:
            raise UserError("data.source_unreadable", path=file.path, reason=error.strerror or str(error)) from None

    def stream(self) -> BinaryIO:
        """The unpacked bytes."""
        if not self.file.compression:
            self._stream = io.BufferedReader(self.raw, BUFFER)
            return self._stream
        if self.file.compression == "gzip":
            unpacked: Any = gzip.GzipFile(fileobj=io.BufferedReader(self.raw, 65536))
        else:
            pa = need_pyarrow()
            unpacked = pa.CompressedInputStream(pa.PythonFile(self.raw, mode="r"), "zstd")
        self.unpacked = _Unpacked(unpacked, self.file)
        self._stream = io.BufferedReader(self.unpacked, BUFFER)
        return self._stream

    def read_bytes(self) -> int:
        """Bytes of the file itself that were read."""
        try:
            return int(self.raw.tell())
        except OSError:
            return 0  # a pipe has no place

    def abandon(self) -> None:
        """Close it."""
        if self._stream is not None:
            self._stream.close()
        self.raw.close()

    def close(self) -> None:
        """Close it and check that it is still what was listed. Raises UserError 'data.source_changed'."""
        self.abandon()
        if not self.file.remote and self.file.kind != "stdin":
            try:
                state = Path(self.file.path).stat()
                now = (state.st_size, str(state.st_mtime_ns))
            except OSError:
                now = (None, "")
            if now != (self.file.size_bytes, self.file.stamp):
                raise UserError("data.source_changed", path=self.file.path)


class _Unpacked(io.RawIOBase):
    """An unpacker's output, counted against the size of the file."""

    def __init__(self, unpacked: Any, file: SourceFile) -> None:
        self.unpacked, self.file, self.total = unpacked, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.unpacked.read(len(buffer))
        self.total += len(piece)
        check_ratio(self.file, self.total)
        buffer[: len(piece)] = piece
        return len(piece)


def check_ratio(file: SourceFile, unpacked_bytes: int) -> None:
    """Raises UserError 'data.source_bomb' when a file unpacks to what no text does."""
    size = file.size_bytes or 0
    if unpacked_bytes > max(BOMB_BYTES, BOMB_RATIO * size) and file.kind != "stdin":
        raise UserError("data.source_bomb", path=file.path, size=size, unpacked=unpacked_bytes, ratio=BOMB_RATIO)


@cache
def need_pyarrow() -> Any:
    """pyarrow with its Parquet, of the extra `data`. Raises UserError 'environment.missing_extra'."""
    need_extra("pyarrow.parquet", "data")
    pyarrow = need_extra("pyarrow", "data")
    pyarrow.set_cpu_count(1)
    return pyarrow


def reason_of(error: BaseException) -> str:
    """The first line of what a library says."""
    text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    return text or type(error).__name__


def clean(raw: bytes) -> tuple[bytes, bool]:
    """UTF-8 as it is; what is no UTF-8 becomes U+FFFD, and that is told."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace").encode(), True
    return raw, False
