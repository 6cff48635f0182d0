"""A source file, unpacked within limits, and the documents and places in it."""

import fnmatch
import gzip
import io
import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

from foretrain.base.errors import UserError, need_extra
from foretrain.base.records import Record

Kind = Literal["text", "jsonl", "parquet", "stdin"]

_KINDS: dict[str, Kind] = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


class SourceFile(Record):
    """One file. `stamp` changes with its content: time of change here, object id at Hugging Face."""

    path: str
    kind: Kind
    compression: str = ""
    size_bytes: int | None = None
    stamp: str = ""

    @property
    def remote(self) -> bool:
        return self.path.startswith("hf://")


def kind_of(name: str) -> tuple[Kind, str] | None:
    suffixes = ["", "", *(suffix.lower() for suffix in PurePath(name).suffixes)]
    compression = _COMPRESSIONS.get(suffixes[-1], "")
    kind = _KINDS.get(suffixes[-2] if compression else suffixes[-1])
    return None if kind is None or (compression and kind == "parquet") else (kind, compression)


def suffix_of(name: str) -> str:
    return PurePath(name).suffix.lower() or "without a suffix"


def left_out_text(left_out: dict[str, int]) -> str:
    most = sorted(left_out.items(), key=lambda item: -item[1])[:4]
    listed = ", ".join(f"{count} {suffix}" for suffix, count in most)
    return f" (it has {listed})" if listed else ""


# Listing pins the revision, so that a resumed preparation reads the same bytes.

CHUNK_BYTES = 4 * 2**20
_ATTEMPTS, _FIRST_WAIT_S = 6, 0.5


def need_hub() -> Any:
    return need_extra("huggingface_hub", "data")


def parts_of(url: str) -> tuple[str, str | None, str]:
    """Return (owner/name, revision or None, path inside) of hf://datasets/OWNER/NAME[@REVISION][/PATH]."""
    words = url.removeprefix("hf://").split("/")
    if len(words) < 3 or words[0] != "datasets" or not all(words[1:3]):
        raise UserError("usage.hf_url", url=url[:200])
    name, _, revision = words[2].partition("@")
    return f"{words[1]}/{name}", revision.replace("%2F", "/") or None, "/".join(words[3:]).strip("/")


def list_files(url: str, left_out: Counter[str]) -> list[SourceFile]:
    """List the text files of a dataset, or of a folder, file or glob in it. Raises UserError 'data.source_remote'."""
    repo, revision, inside = parts_of(url)
    api = need_hub().HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        sha = api.repo_info(repo, repo_type="dataset", revision=revision).sha
        folder = inside if not set("*?[") & set(inside) else ""
        listed = list(
            api.list_repo_tree(repo, folder or None, recursive=True, revision=sha, repo_type="dataset")
            if not folder or kind_of(folder) is None
            else api.get_paths_info(repo, [folder], revision=sha, repo_type="dataset")
        )
    except Exception as error:  # of requests, TLS, missing names and missing rights: the library words them
        raise UserError("data.source_remote", path=url, reason=_first_line(error)) from None
    found = []
    for entry in sorted(listed, key=lambda entry: entry.path):
        if getattr(entry, "size", None) is None or (
            folder == "" and inside and not fnmatch.fnmatch(entry.path, inside)
        ):
            continue
        kind = kind_of(entry.path)
        if kind is None:
            left_out[suffix_of(entry.path)] += 1
            continue
        path = f"hf://datasets/{repo}@{sha}/{entry.path}"
        stamp = entry.lfs.sha256 if entry.lfs else entry.blob_id
        found.append(SourceFile(path=path, kind=kind[0], compression=kind[1], size_bytes=entry.size, stamp=str(stamp)))
    if not found:
        raise UserError("data.source_nothing", path=url, others=left_out_text(left_out))
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200] or type(error).__name__


class RemoteFile(io.RawIOBase):
    """A file at Hugging Face with random access. Raises UserError 'data.source_download' after six attempts."""

    def __init__(self, path: str, size_bytes: int) -> None:
        hub = need_hub()
        repo, revision, inside = parts_of(path)
        self.name, self.size_bytes = path, size_bytes
        self.fetched_bytes = 0
        self._url = hub.hf_hub_url(
            repo, inside, repo_type="dataset", revision=revision, endpoint=os.environ.get("HF_ENDPOINT")
        )
        self._headers: dict[str, str] = hub.utils.build_hf_headers()
        self._session = hub.utils.get_session()
        self._at, self._chunk, self._chunk_at = 0, b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.size_bytes)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at >= self.size_bytes or not len(view):
            return 0
        if not self._chunk_at <= self._at < self._chunk_at + len(self._chunk):
            # A small read somewhere, as of Parquet's footer, does not need a whole chunk.
            size = min(max(len(view), 65536 if self._at else CHUNK_BYTES), CHUNK_BYTES)
            if self._at == self._chunk_at + len(self._chunk):
                size = CHUNK_BYTES
            self._chunk, self._chunk_at = self._fetch(self._at, min(self._at + size, self.size_bytes)), self._at
        start = self._at - self._chunk_at
        piece = self._chunk[start : start + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _fetch(self, start: int, end: int) -> bytes:
        """Return bytes [start, end) of the listed file, whole; what came before a broken connection is kept."""
        got, reason, wait_s = b"", "", _FIRST_WAIT_S
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(wait_s)
                wait_s *= 2
            reason, more = self._attempt(start + len(got), end)
            got += more
            self.fetched_bytes += len(more)
            if len(got) == end - start:
                return got
        raise UserError("data.source_download", path=self.name, reason=reason, start=start, attempts=_ATTEMPTS)

    def _attempt(self, start: int, end: int) -> tuple[str, bytes]:
        got = bytearray()
        try:
            headers = {**self._headers, "range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
            with self._session.stream("GET", self._url, headers=headers, timeout=30, follow_redirects=True) as answer:
                if answer.status_code not in (200, 206):
                    return f"the server answers {answer.status_code}", b""
                total = answer.headers.get("content-range", f"/{self.size_bytes}").rpartition("/")[2]
                if total not in ("*", str(self.size_bytes)):
                    return f"the server has {total} bytes instead of {self.size_bytes}", b""
                if answer.status_code == 200 and (start or end < self.size_bytes):
                    return "the server does not answer ranges", b""
                for piece in answer.iter_raw():
                    got += piece
                    if len(got) > end - start:
                        return "the server sends more than was asked for", b""
        except Exception as error:  # httpx and its TLS: names, time-outs, cuts
            return f"{type(error).__name__}: {_first_line(error)}", bytes(got)
        return "the connection was cut", bytes(got)


# A file that unpacks to this many times its size, and to more than this, is a bomb: text packs 3 to 10 fold.
BOMB_RATIO, BOMB_BYTES = 500, 256 * 2**20

BUFFER = 2**20


@dataclass(frozen=True)
class Format:
    text_column: str
    split_documents: str  # file, lines, blank-lines, or a text that stands between documents
    max_document_bytes: int
    skip_bad: bool


@dataclass(frozen=True)
class Place:
    """After `records` documents or rows of a file; an uncompressed one continues at byte `offset`."""

    records: int = 0
    offset: int = 0


@dataclass
class Document:
    text: bytes | None
    place: Place
    replaced: bool = False
    bad: bool = False


class OpenFile:
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
            raise UserError("data.unreadable", path=file.path, reason=error.strerror or str(error)) from None

    def stream(self) -> BinaryIO:
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
        try:
            return int(self.raw.tell())
        except OSError:
            return 0  # a pipe has no place

    def abandon(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.raw.close()

    def close(self) -> None:
        """Close it and check that it has not changed since listing. Raises UserError 'data.source_changed'."""
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
    size = file.size_bytes or 0
    if unpacked_bytes > max(BOMB_BYTES, BOMB_RATIO * size) and file.kind != "stdin":
        raise UserError("data.source_bomb", path=file.path, size=size, unpacked=unpacked_bytes, ratio=BOMB_RATIO)


@cache
def need_pyarrow() -> Any:
    need_extra("pyarrow.parquet", "data")
    pyarrow = need_extra("pyarrow", "data")
    pyarrow.set_cpu_count(1)
    return pyarrow


def reason_of(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    return text or type(error).__name__


def clean(raw: bytes) -> tuple[bytes, bool]:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace").encode(), True
    return raw, False
