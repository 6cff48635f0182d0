"""Documents of one file: text, JSON lines, Parquet, compressed or not, in bounded pieces. Runs in the reader process.

Each document is yielded with the place after it, so that reading can go on there. Nothing larger than the cap of a
document is ever held, whatever a file claims, and everything that is wrong is one UserError with file and line.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.base.errors import UserError
from foretrain.data.prepare.sources import SourceFile

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
                from foretrain.data.prepare.remote import RemoteFile

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


def need_pyarrow() -> Any:
    """pyarrow, of the extra `data`. Raises UserError 'environment.missing_extra'."""
    try:
        import pyarrow
    except ImportError:
        raise UserError("environment.missing_extra", package="pyarrow", extra="data") from None
    pyarrow.set_cpu_count(1)
    return pyarrow


def documents(opened: OpenFile, format: Format, start: Place) -> Iterator[Document]:
    """The documents of a file after `start`. Raises UserError 'data.source_…'."""
    file = opened.file
    try:
        if file.kind == "parquet":
            from foretrain.data.prepare.parquet import rows

            yield from rows(opened, format, start.records)
            return
        stream = opened.stream()
        if start.offset and not file.compression and file.kind != "stdin":
            stream.seek(start.offset)
            skip = 0
        else:
            skip, start = start.records, Place()
        kind = _sniff(stream) if file.kind == "stdin" else file.kind
        made = _lines_of_json(stream, file, format, start) if kind == "jsonl" else _texts(stream, file, format, start)
        for document in made:
            if document.place.records > skip:
                yield document
    except UserError:
        raise
    except EOFError:
        raise UserError("data.source_truncated", path=file.path) from None
    except MemoryError:
        raise UserError("data.source_memory", path=file.path) from None
    except (OSError, zlib.error, ValueError) as error:
        raise UserError("data.source_corrupt", path=file.path, reason=reason_of(error)) from None


def reason_of(error: BaseException) -> str:
    """The first line of what a library says."""
    text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    return text or type(error).__name__


def _sniff(stream: Any) -> str:
    return "jsonl" if stream.peek(64).lstrip()[:1] == b"{" else "text"


def clean(raw: bytes) -> tuple[bytes, bool]:
    """UTF-8 as it is; what is no UTF-8 becomes U+FFFD, and that is told."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace").encode(), True
    return raw, False


# -- text --------------------------------------------------------------------------------------------------


def _texts(stream: BinaryIO, file: SourceFile, format: Format, start: Place) -> Iterator[Document]:
    first = not start.offset
    if first:
        head = stream.peek(8192)[:8192]  # type: ignore[attr-defined]
        if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError("data.source_binary", path=file.path)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError("data.source_utf16", path=file.path)
    records = start.records
    for raw, offset in _pieces(stream, file, format, start.offset):
        if first:
            raw, first = raw.removeprefix(b"\xef\xbb\xbf"), False
        records += 1
        place = Place(records, offset)
        if len(raw) > format.max_document_bytes:
            if not format.skip_bad:
                raise _too_long(file, format, "document", records)
            yield Document(None, place, bad=True)
        elif not raw.strip():
            yield Document(None, place)
        else:
            text, replaced = clean(raw)
            yield Document(text, place, replaced)


def _pieces(stream: BinaryIO, file: SourceFile, format: Format, offset: int) -> Iterator[tuple[bytes, int]]:
    """(document, offset after it). What goes beyond the cap is cut there, one byte longer than may be."""
    cap = format.max_document_bytes
    if format.split_documents == "file":
        if offset:
            return
        raw = _read_all(stream, cap + 1)
        if len(raw) > cap and format.skip_bad:
            while stream.read(BUFFER):
                pass
        yield raw, offset + len(raw)
    elif format.split_documents in ("lines", "blank-lines"):
        yield from by_lines(stream, cap, offset, blank=format.split_documents == "blank-lines")
    else:
        yield from by_marker(stream, cap, offset, format.split_documents.encode())


def _read_all(stream: BinaryIO, most: int) -> bytes:
    """Up to `most` bytes; a file that is one document is not small at once."""
    made = bytearray()
    while len(made) < most and (piece := stream.read(min(BUFFER, most - len(made)))):
        made += piece
    return bytes(made)


def by_lines(stream: BinaryIO, cap: int, offset: int, *, blank: bool) -> Iterator[tuple[bytes, int]]:
    """Documents (cut behind the cap) and where each ends: one a line, or with `blank` those between empty lines."""
    held = bytearray()
    while line := stream.readline(cap + 1):
        offset += len(line)
        if len(held) <= cap:
            held += line
        if not line.endswith(b"\n") and len(line) > cap:
            continue  # the rest of a line that is too long
        if not blank:
            yield bytes(held).rstrip(b"\r\n") if len(held) <= cap else bytes(held), offset
            held.clear()
        elif not line.strip() and held.strip():
            yield bytes(held), offset
            held.clear()
    if held.strip():
        yield bytes(held), offset


def by_marker(stream: BinaryIO, cap: int, offset: int, marker: bytes) -> Iterator[tuple[bytes, int]]:
    """Documents (cut behind the cap) and where each ends: those between markers."""
    held, searched, lost = bytearray(), 0, 0  # lost: bytes dropped from a document beyond the cap
    while piece := stream.read(BUFFER):
        held += piece
        while (at := held.find(marker, searched)) >= 0:
            offset += lost + at + len(marker)
            yield bytes(held[: cap + 1 if lost else at]), offset
            del held[: at + len(marker)]
            searched = lost = 0
        searched = max(0, len(held) - len(marker) + 1)
        if len(held) > 2 * cap + 2 * len(marker) + BUFFER:
            drop = len(held) - (cap + 1) - len(marker)
            del held[cap + 1 : cap + 1 + drop]
            lost, searched = lost + drop, cap + 1
    if held.strip():
        yield bytes(held), offset + lost + len(held)


def _too_long(file: SourceFile, format: Format, unit: str, number: int) -> UserError:
    return UserError(
        "data.source_too_long" if unit != "document" else "data.source_text_too_long",
        path=file.path, unit=unit, number=number, cap=format.max_document_bytes,
    )  # fmt: skip


# -- JSON lines --------------------------------------------------------------------------------------------


def _lines_of_json(stream: BinaryIO, file: SourceFile, format: Format, start: Place) -> Iterator[Document]:
    # Escapes make text longer: \u00e9 is six bytes for two; other columns stand in the line as well.
    cap = 4 * format.max_document_bytes + BUFFER
    records, offset = start.records, start.offset
    while line := stream.readline(cap + 1):
        offset += len(line)
        records += 1
        bad: UserError | None = None
        text, replaced = None, False
        if len(line) > cap:
            bad = _too_long(file, format, "line", records)
            while format.skip_bad and line and not line.endswith(b"\n"):
                line = stream.readline(cap + 1)
                offset += len(line)
        elif line.strip():
            try:
                text, replaced = _text_of_line(line, file, format, records)
            except UserError as error:
                bad = error
        if bad is not None and not format.skip_bad:
            raise bad
        yield Document(text or None, Place(records, offset), replaced, bad=bad is not None)


def _text_of_line(line: bytes, file: SourceFile, format: Format, number: int) -> tuple[bytes | None, bool]:
    whole, replaced = clean(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
    try:
        row = json.loads(whole.decode())
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
        if not whole.strip(b"\0 \r\n\t"):
            reason = "it holds only NUL bytes, as a file has after a crash"
        raise UserError("data.source_line", path=file.path, line=number, reason=reason) from None
    if not isinstance(row, dict):
        raise UserError(
            "data.source_line", path=file.path, line=number, reason=f"it is a {type(row).__name__}, not an object"
        )
    if format.text_column not in row:
        columns = sorted(str(name)[:40] for name in row)[:12]
        raise UserError("data.source_no_column", path=file.path, column=format.text_column, columns=columns)
    value = row[format.text_column]
    if value is None:
        return None, replaced
    if not isinstance(value, str):
        raise UserError(
            "data.source_line", path=file.path, line=number,
            reason=f"{format.text_column} is a {type(value).__name__}, not a text",
        )  # fmt: skip
    try:
        text = value.encode()
    except UnicodeEncodeError:  # "\ud800" alone is valid JSON and no text
        text, replaced = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(), True
    if len(text) > format.max_document_bytes:
        raise _too_long(file, format, "line", number)
    return (text if text.strip() else None), replaced
