"""Documents of one file: text, JSON lines, Parquet, compressed or not, in pieces no larger than the cap of a document.
Every fault is one UserError with file and line."""

import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from pydantic_core import from_json

from foretrain.base.errors import UserError
from foretrain.data.prepare.opened import (
    BUFFER,
    Document,
    Format,
    OpenFile,
    Place,
    SourceFile,
    check_ratio,
    clean,
    need_pyarrow,
    reason_of,
)

# A row group is never read as a whole: 701 bytes can hold 100,000 times the same megabyte, 100 GB of text.

BATCH_ROWS = 64
_BUFFER = 2**20
_MOST_FOOTER = 64 * 2**20


def open_parquet(opened: OpenFile, column: str) -> tuple[Any, int]:
    pa = need_pyarrow()
    path = opened.file.path
    _check_footer(opened)
    try:
        parquet = pa.parquet.ParquetFile(
            pa.PythonFile(opened.raw, mode="r"), buffer_size=_BUFFER, pre_buffer=False,
            thrift_string_size_limit=_MOST_FOOTER, thrift_container_size_limit=10_000_000,
            page_checksum_verification=True,
        )  # fmt: skip
        schema = parquet.schema_arrow
    except Exception as error:
        raise _corrupt(path, error) from None
    names = [str(name) for name in schema.names]
    if column not in names:
        raise UserError("data.source_no_column", path=path, column=column, columns=[n[:40] for n in names[:12]])
    if names.count(column) > 1:
        raise UserError("data.source_corrupt", path=path, reason=f"it has {names.count(column)} columns {column}")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(
        test(value)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
                     pa.types.is_string_view, pa.types.is_binary_view)
    ):  # fmt: skip
        raise UserError("data.source_column_type", path=path, column=column, type=str(kind)[:80])
    leaves = [parquet.metadata.schema.column(i).path for i in range(parquet.metadata.num_columns)]
    return parquet, leaves.index(column)


def _check_footer(opened: OpenFile) -> None:
    path, raw, size = opened.file.path, opened.raw, opened.file.size_bytes or 0
    raw.seek(0)
    head = raw.read(4)
    raw.seek(max(0, size - 8))
    tail = b""
    while len(tail) < min(8, size) and (piece := raw.read(8 - len(tail))):
        tail += piece
    raw.seek(0)
    if size == 0:
        raise UserError("data.source_empty", path=path)
    if tail[4:] == b"PARE":
        raise UserError("data.source_corrupt", path=path, reason="it is encrypted")
    if size < 12 or head != b"PAR1":
        raise UserError("data.source_not_parquet", path=path)
    if tail[4:] != b"PAR1":
        raise UserError("data.source_truncated", path=path)
    footer = int.from_bytes(tail[:4], "little")
    if footer > min(size - 12, _MOST_FOOTER):
        raise UserError("data.source_corrupt", path=path, reason=f"its footer claims {footer:,} bytes")


def rows(opened: OpenFile, format: Format, skip: int) -> Iterator[Document]:
    file = opened.file
    parquet, _ = open_parquet(opened, format.text_column)
    row, total = 0, 0
    for group in range(parquet.metadata.num_row_groups):
        count = parquet.metadata.row_group(group).num_rows
        if count < 0:
            raise UserError("data.source_corrupt", path=file.path, reason=f"row group {group} claims {count} rows")
        if row + count <= skip:
            row += count
            continue
        found = 0
        for raw in _cells(parquet, group, format, file.path):
            found += 1
            row += 1
            if row > skip:
                total += len(raw or b"")
                check_ratio(file, total)
                yield _document(raw, Place(row), format, file, Document)
        if found != count:
            raise UserError(
                "data.source_corrupt", path=file.path, reason=f"row group {group} has {found} rows instead of {count}"
            )


def _document(raw: bytes | None, place: Any, format: Format, file: Any, make: Any) -> Document:
    if raw is not None and len(raw) > format.max_document_bytes:
        if not format.skip_bad:
            raise UserError(
                "data.source_too_long", path=file.path, unit="row", number=place.records, cap=format.max_document_bytes
            )
        return make(None, place, bad=True)
    if raw is None or not raw.strip():
        return make(None, place)
    text, replaced = clean(raw)
    return make(text, place, replaced)


def _cells(parquet: Any, group: int, format: Format, path: str) -> Iterator[bytes | None]:
    done = 0
    for batch_rows in (BATCH_ROWS, 1):
        position = 0
        batches = parquet.iter_batches(
            batch_size=batch_rows, row_groups=[group], columns=[format.text_column], use_threads=False
        )
        while True:
            try:
                batch = next(batches, None)
                column = None if batch is None else _as_binary(batch.column(0))
            except MemoryError:
                break
            except Exception as error:
                raise _corrupt(path, error) from None
            if column is None:
                return
            for index in range(len(column)):
                position += 1
                if position > done:
                    done += 1
                    yield column[index].as_py()
    raise UserError("data.source_memory", path=path)


def _as_binary(column: Any) -> Any:
    """Drop the claim that a column is UTF-8, which is checked cell by cell."""
    pa = need_pyarrow()
    if pa.types.is_dictionary(column.type):
        value = column.type.value_type
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(_binary_of(value)))
    return column.cast(_binary_of(column.type))


def _binary_of(kind: Any) -> Any:
    pa = need_pyarrow()
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    return pa.large_binary() if large else pa.binary()


def _corrupt(path: str, error: BaseException) -> UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, MemoryError) or "malloc of size" in str(error):
        return UserError("data.source_memory", path=path)
    return UserError("data.source_corrupt", path=path, reason=reason_of(error))


# Pydantic's parser is twice as fast and accepts nothing that Python's does not; it cannot report memory errors, so it
# gets short lines only.
_QUICK_BYTES = 2**20


def documents(opened: OpenFile, format: Format, start: Place) -> Iterator[Document]:
    """Yield the documents of a file after `start`. Raises UserError 'data.source_…'."""
    file = opened.file
    try:
        if file.kind == "parquet":
            yield from rows(opened, format, start.records)
            return
        stream = opened.stream()
        if start.offset and not file.compression and file.kind != "stdin":
            stream.seek(start.offset)
            skip = 0
        else:
            skip, start = start.records, Place()
        kind = file.kind
        if kind == "stdin":
            kind = "jsonl" if stream.peek(64).lstrip()[:1] == b"{" else "text"  # type: ignore[attr-defined]
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
    """Yield (document, offset after it). Beyond the cap a document is cut, one byte longer than allowed."""
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
    made = bytearray()
    while len(made) < most and (piece := stream.read(min(BUFFER, most - len(made)))):
        made += piece
    return bytes(made)


def by_lines(stream: BinaryIO, cap: int, offset: int, *, blank: bool) -> Iterator[tuple[bytes, int]]:
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


def _lines_of_json(stream: BinaryIO, file: SourceFile, format: Format, start: Place) -> Iterator[Document]:
    # Escapes make text longer: \u00e9 is six bytes for two; other columns are in the line as well.
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
        elif not line.isspace():  # which looks no further than it must, and copies nothing
            try:
                text, replaced = _text_of_line(line, file, format, records)
            except UserError as error:
                bad = error
        if bad is not None and not format.skip_bad:
            raise bad
        yield Document(text or None, Place(records, offset), replaced, bad=bad is not None)


def _parsed(line: bytes, file: SourceFile, number: int) -> tuple[Any, bool]:
    if len(line) <= _QUICK_BYTES:
        try:
            return from_json(line, cache_strings="keys"), False
        except ValueError:
            pass  # invalid UTF-8, half of a surrogate pair, a byte order mark, or not JSON: Python's own parser decides
    whole, replaced = clean(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
    try:
        return json.loads(whole.decode()), replaced
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
        if not whole.strip(b"\0 \r\n\t"):
            reason = "it holds only NUL bytes, as a file has after a crash"
        raise UserError("data.source_line", path=file.path, line=number, reason=reason) from None


def _text_of_line(line: bytes, file: SourceFile, format: Format, number: int) -> tuple[bytes | None, bool]:
    row, replaced = _parsed(line, file, number)
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
    return (None if not text or text.isspace() else text), replaced
