"""Answers that took time, each in a file named by the hash of all that decides it; a damaged file counts as none."""

import contextlib
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from foretrain.base.files import RECORD_BYTES, read_bytes, replace
from foretrain.base.installation import cache_folder
from foretrain.base.records import Record

Kept = TypeVar("Kept", bound=Record)
_GZIP = 31  # zlib's window of 32 KiB within gzip's header and checksum


@dataclass(frozen=True)
class Cache:
    folder: str
    compressed: bool = False
    most_bytes: int = RECORD_BYTES
    most_files: int = 0

    def path(self, question: object) -> Path:
        text = question if isinstance(question, str) else json.dumps(question, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:20]
        return cache_folder() / self.folder / f"{key}.json{'.gz' if self.compressed else ''}"

    def value(self, path: Path) -> Any:
        try:
            return json.loads(self._text(path))
        except (OSError, zlib.error, ValueError, RecursionError):
            return None

    def record(self, path: Path, kind: type[Kept]) -> Kept | None:
        try:
            return kind.from_json(self._text(path))
        except (OSError, zlib.error, ValueError, RecursionError):
            return None

    def _text(self, path: Path) -> str:
        data = read_bytes(path, self.most_bytes)
        if self.compressed:
            unpacked = zlib.decompressobj(_GZIP)
            data = unpacked.decompress(data, self.most_bytes + 1)
            if not unpacked.eof or len(data) > self.most_bytes:
                raise ValueError("it is cut short or too long")
        return data.decode("utf-8")

    def write(self, path: Path, text: str) -> None:
        """Write a text so that its file is whole or absent. Raises OSError."""
        data = zlib.compress(text.encode(), 3, wbits=_GZIP) if self.compressed else text.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, data, sync=False)
        if self.most_files:
            self._prune(path.parent)

    def _prune(self, folder: Path) -> None:
        files = folder.glob(f"*{'[0-9a-f]' * 20}.json*")  # and nothing of others'
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            for file in sorted(files, key=lambda file: file.stat().st_mtime)[: -self.most_files]:
                file.unlink()

    def keep(self, path: Path, text: str) -> None:
        with contextlib.suppress(OSError):
            self.write(path, text)
