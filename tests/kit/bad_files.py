"""Files that a preparation may meet and that are not what they should be, each with what has to be said about it."""

import gzip
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOOD_ROWS = [f"row {i} " + "word " * (i % 50) for i in range(200)]

CORRUPT = {"data.source_corrupt", "data.source_truncated", "data.source_memory", "data.source_not_parquet"}


def parquet_bytes(column: Any = None, name: str = "text", **settings: Any) -> bytes:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table({name: GOOD_ROWS if column is None else column}), sink, **settings)
    return sink.getvalue()


def bomb() -> bytes:
    """About 700 bytes that decode to 100 GB: a dictionary of one value of 1 MB, and 100,000 rows of it."""
    import pyarrow as pa

    value = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 10**6]))
    return parquet_bytes(value, compression="zstd", dictionary_pagesize_limit=2**30)


def bad_parquets() -> Iterator[tuple[str, bytes, set[str] | None]]:
    """(name, contents, the ids of which one must be told; None: it may also be readable, but must end well)."""
    import pyarrow as pa

    good = parquet_bytes(row_group_size=50)
    footer = struct.unpack("<I", good[-8:-4])[0]
    yield "empty", b"", {"data.source_empty"}
    for name, data in (
        ("four bytes", b"PAR1"), ("magic twice", b"PAR1PAR1"), ("text", b"hello world, not parquet"),
        ("zip", b"PK\3\4" + bytes(100)), ("gzip", gzip.compress(good)), ("zeros", bytes(1000)), ("head cut", good[4:]),
    ):  # fmt: skip
        yield name, data, {"data.source_not_parquet"}
    for part in range(1, 11):
        yield f"cut at {part}/11", good[: len(good) * part // 11], {"data.source_truncated"}
    yield "encrypted", good[:-4] + b"PARE", {"data.source_corrupt"}
    yield "tail", good[:-4] + b"XXXX", {"data.source_truncated"}
    for length in (0, 1, footer - 1, footer + 1, len(good), 2**31, 2**32 - 1):
        yield f"footer of {length}", good[:-8] + struct.pack("<I", length) + b"PAR1", {"data.source_corrupt"}
    types: dict[str, Any] = {
        "int": pa.array([1] * 9), "float": pa.array([1.5] * 9), "bool": pa.array([True] * 9), "null": pa.nulls(9),
        "list": pa.array([["a"]] * 9), "struct": pa.array([{"a": "b"}] * 9), "time": pa.array([1], pa.timestamp("s")),
        "map": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())), "decimal": pa.array([1], pa.decimal128(5)),
        "fixed": pa.array([b"abcd"], pa.binary(4)),
    }  # fmt: skip
    for name, column in types.items():
        yield f"type {name}", parquet_bytes(column), {"data.source_column_type"}
    yield "no column", parquet_bytes(name="content"), {"data.source_no_column"}
    yield "bomb", bomb(), {"data.source_bomb"}
    yield "long cell", parquet_bytes(["x" * (17 * 2**20)], compression="zstd"), {"data.source_too_long"}
    chance = random.Random(3)
    for number in range(10):
        data = bytearray(good)
        for _ in range(3):
            data[len(good) - 8 - chance.randrange(footer)] ^= 1 << chance.randrange(8)
        yield f"footer flips {number}", bytes(data), None
    for number in range(10):
        data = bytearray(good)
        for _ in range(8):
            data[4 + chance.randrange(len(good) - footer - 12)] ^= 1 << chance.randrange(8)
        yield f"page flips {number}", bytes(data), None


def huge_page() -> bytes:
    """One page of 0.9 GB of cells that are each short enough, in a few kilobytes."""
    return parquet_bytes(
        ["y" * (15 * 2**20)] * 60, compression="zstd", use_dictionary=False, data_page_size=2**31 - 1,
        write_batch_size=1000,
    )  # fmt: skip


def bad_texts() -> Iterator[tuple[str, bytes, set[str]]]:
    import pyarrow as pa

    blank = (b" " * (2**20 - 1) + b"\n") * 260
    good = "".join(json.dumps({"text": row}) + "\n" for row in GOOD_ROWS).encode()
    line = {"data.source_line"}
    yield "torn.jsonl", good[:-5], line
    yield "nul.jsonl", good + bytes(500) + b"\n", line
    yield "list.jsonl", b'["a"]\n', line
    yield "number.jsonl", b'{"text": 5}\n', line
    yield "deep.jsonl", b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", line
    yield "digits.jsonl", b'{"text": ' + b"9" * 10_000 + b"}\n", line
    yield "other.jsonl", b'{"content": "a"}\n', {"data.source_no_column"}
    yield "one-line.jsonl", b'{"text": "' + b"x" * (66 * 2**20), {"data.source_too_long"}
    yield "long.jsonl", b'{"text": "' + b"x" * (17 * 2**20) + b'"}\n', {"data.source_too_long"}
    yield "long.txt", b"x" * (17 * 2**20), {"data.source_text_too_long"}
    yield "binary.txt", b"ab\0\1\2" * 100, {"data.source_binary"}
    yield "utf16.txt", "hello".encode("utf-16"), {"data.source_utf16"}
    yield "cut.jsonl.gz", gzip.compress(good)[:-20], {"data.source_truncated"}
    yield "flip.jsonl.gz", _flipped(gzip.compress(good)), {"data.source_corrupt", *line}
    yield "no.jsonl.gz", b"not packed at all", {"data.source_corrupt"}
    yield "bomb.txt.gz", gzip.compress(bytes(b"x \n" * 2**20) * 100), {"data.source_text_too_long"}
    yield "bomb.jsonl.gz", gzip.compress(blank, 9), {"data.source_bomb"}
    zst = pa.compress(good, "zstd", asbytes=True)
    yield "cut.jsonl.zst", zst[:-20], {"data.source_corrupt"}
    yield "no.jsonl.zst", b"not packed at all", {"data.source_corrupt"}
    yield "bomb.jsonl.zst", pa.compress(blank, "zstd", asbytes=True), {"data.source_bomb"}


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 0x10
    return bytes(changed)


def write_all(folder: Path) -> dict[Path, set[str] | None]:
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[Path, set[str] | None] = {}
    for name, data, ids in bad_parquets():
        path = folder / f"{name.replace('/', '-')}.parquet"
        path.write_bytes(data)
        made[path] = ids
    for name, data, text_ids in bad_texts():
        (folder / name).write_bytes(data)
        made[folder / name] = text_ids
    return made
