"""One file to read: its kind by its name, and what tells it apart from others."""

from pathlib import PurePath
from typing import Literal

from foretrain.base.records import Record

Kind = Literal["text", "jsonl", "parquet", "stdin"]

_KINDS: dict[str, Kind] = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


class SourceFile(Record):
    """One file. `stamp` changes when it is written to: time of change here, object id at Hugging Face."""

    path: str
    kind: Kind
    compression: str = ""
    size_bytes: int | None = None
    stamp: str = ""

    @property
    def remote(self) -> bool:
        return self.path.startswith("hf://")


def kind_of(name: str) -> tuple[Kind, str] | None:
    """(kind, compression) by a file's suffixes, None where they say nothing."""
    suffixes = ["", "", *(suffix.lower() for suffix in PurePath(name).suffixes)]
    compression = _COMPRESSIONS.get(suffixes[-1], "")
    kind = _KINDS.get(suffixes[-2] if compression else suffixes[-1])
    return None if kind is None or (compression and kind == "parquet") else (kind, compression)


def suffix_of(name: str) -> str:
    """For counting what is left out."""
    return PurePath(name).suffix.lower() or "without a suffix"


def others(left_out: dict[str, int]) -> str:
    """' (it has 12 .py, 3 .csv)', or nothing."""
    most = sorted(left_out.items(), key=lambda item: -item[1])[:4]
    listed = ", ".join(f"{count} {suffix}" for suffix, count in most)
    return f" (it has {listed})" if listed else ""
