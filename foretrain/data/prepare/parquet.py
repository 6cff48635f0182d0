"""Rows of a Parquet file, a few at a time. Runs in the reader process, whose memory is limited.

A row group is never read as a whole: 701 bytes can hold 100,000 times the same megabyte, 100 GB of text.
"""

from collections.abc import Iterator
from typing import Any

from foretrain.base.errors import UserError
from foretrain.data.prepare.opened import Document, Format, OpenFile, Place, check_ratio, clean, need_pyarrow, reason_of

BATCH_ROWS = 64
_BUFFER = 2**20
_MOST_FOOTER = 64 * 2**20


def open_parquet(opened: OpenFile, column: str) -> tuple[Any, int]:
    """(pyarrow's ParquetFile, the column's place among the leaves) of a file that has `column` as text."""
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
    """What pyarrow would word poorly, or take memory for: no Parquet at all, cut short, a footer that cannot be."""
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
    """The documents after the first `skip` rows."""
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
    """The cells of a row group as bytes. Where a batch does not fit into memory, its rows are tried one by one."""
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
    """The column without the claim that it is UTF-8, which is checked cell by cell."""
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
