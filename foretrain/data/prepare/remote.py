"""Files of a dataset at Hugging Face, read by range: nothing is kept on disk, and a cut connection is taken up again.

The revision is pinned when the files are listed, so that a preparation that goes on later reads the same bytes.
"""

import fnmatch
import io
import os
import time
from collections import Counter
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.installation import need_extra
from foretrain.data.prepare.source_file import SourceFile, kind_of, others, suffix_of

CHUNK_BYTES = 4 * 2**20
_ATTEMPTS, _FIRST_WAIT_S = 6, 0.5


def need_hub() -> Any:
    """huggingface_hub, of the extra `data`. Raises UserError 'environment.missing_extra'."""
    return need_extra("huggingface_hub", "data")


def parts_of(url: str) -> tuple[str, str | None, str]:
    """(owner/name, revision or None, path inside) of hf://datasets/OWNER/NAME[@REVISION][/PATH]."""
    words = url.removeprefix("hf://").split("/")
    if len(words) < 3 or words[0] != "datasets" or not all(words[1:3]):
        raise UserError("usage.hf_url", url=url[:200])
    name, _, revision = words[2].partition("@")
    return f"{words[1]}/{name}", revision.replace("%2F", "/") or None, "/".join(words[3:]).strip("/")


def list_files(url: str, left_out: Counter[str]) -> list[SourceFile]:
    """The text files of a dataset, or of a folder, file or glob in it. Raises UserError 'data.source_remote'."""
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
        raise UserError("data.source_nothing", path=url, others=others(left_out))
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200] or type(error).__name__


class RemoteFile(io.RawIOBase):
    """A file at Hugging Face that can be read anywhere. Raises UserError 'data.source_download' after six attempts."""

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
        """Bytes [start, end), whole and of the file that was listed; what came before a cut is kept."""
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
        """(what went wrong, the bytes that came from `start` on)."""
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
