"""Prepared shards at an address (s3://, gs://, hf://, …), read by fsspec through a bounded cache of this machine. The
index comes first, which is enough for a plan; a shard gets its name when its digest is right."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock

from foretrain.base.errors import UserError, need_extra
from foretrain.base.installation import cache_folder
from foretrain.base.messages import printable
from foretrain.base.quantities import parse_bytes, read
from foretrain.data.dataset import DatasetInfo, read_info
from foretrain.data.shards import INDEX, SPLITS, read_index
from foretrain.data.token_layout import Segment, read_layout

SIZE_VARIABLE, DEFAULT_BYTES = "FORETRAIN_DATA_CACHE_SIZE", 100_000_000_000
PIECE_BYTES = 4 * 2**20
_MAX_FILE_BYTES = 64 * 2**20  # of a tokenizer's
_USED = ".used"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface-hub", "az": "adlfs"}

Progress = Callable[[int], None]
Bar = Callable[[str, int], AbstractContextManager[Progress]]  # of an address and its bytes: shows those that came


def folder_of(url: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in url.rstrip("/").rsplit("/", 1)[-1])
    return cache_folder() / "data" / f"{name[:60].strip('.') or 'set'}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def limit_bytes() -> int:
    text = os.environ.get(SIZE_VARIABLE, "")
    wrong = UserError("usage.cache_size", variable=SIZE_VARIABLE, value=text[:40])
    return read(parse_bytes, text, wrong) if text else DEFAULT_BYTES


def read_remote(url: str) -> DatasetInfo:
    """Read the dataset at an address, fetching only index and tokenizer, or an earlier index. Raises UserError."""
    folder = folder_of(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            try:
                _update(url, folder)
            except UserError as error:
                if error.id != "data.remote" or not (folder / INDEX).is_file():
                    raise
            (folder / _USED).touch()
    except OSError as error:
        raise UserError("environment.cannot_write", path=str(folder), reason=error.strerror or str(error)) from None
    return read_info(folder, remote=url)


def no_bar(label: str, total: int) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(lambda count: None)


def fetch(info: DatasetInfo, bar: Bar = no_bar) -> None:
    """Fetch the missing files of a dataset, or of the parts of a mixture. Raises UserError."""
    for part in info.parts:
        fetch(part.dataset, bar)
    if info.remote is not None:
        with bar(info.remote, sum(segment.end for segment in missing_shards(info))) as progress:
            fetch_all(info, progress)


def fetch_all(info: DatasetInfo, progress: Progress = lambda count: None) -> None:
    """Fetch every missing shard: rows come from anywhere, so a run needs them all. Raises UserError."""
    assert info.remote is not None
    missing = list(missing_shards(info))
    needs = sum(segment.end for segment in missing)
    kept = sum(path.stat().st_size for path in Path(info.path).glob("*.bin"))
    if needs + kept > (limit := limit_bytes()):
        raise UserError("disk.data_cache", url=info.remote, needs=needs + kept, limit=limit, variable=SIZE_VARIABLE)
    _check_room(Path(info.path), needs, info.remote)
    for segment in missing:
        fetch_shard(info.remote, segment, progress)


def missing_shards(info: DatasetInfo) -> Iterator[Segment]:
    layout = read_layout(Path(info.path), info.dtype, present=False)
    for split in SPLITS:
        yield from (segment for segment in layout.splits[split] if not segment.path.is_file())


def fetch_shard(url: str, segment: Segment, progress: Progress = lambda count: None) -> None:
    """Fetch one shard, or the rest of it, and verify its digest. Raises UserError 'data.remote…' or 'disk.…'."""
    folder, part = segment.path.parent, segment.path.with_suffix(".part")
    with FileLock(folder / ".lock"):
        if segment.path.is_file():
            return
        done = min(part.stat().st_size, segment.end) if part.is_file() else 0
        _evict(folder, segment.end - done)
        _check_room(folder, segment.end - done, url)
        try:
            digest = _download(f"{url.rstrip('/')}/{segment.path.name}", part, done, segment.end, progress)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise UserError("data.remote_missing", url=url, file=segment.path.name) from None
            raise _unreachable(url, error) from None
        if digest != segment.sha256:
            part.unlink()
            raise UserError("data.remote_changed", url=url, file=segment.path.name)
        part.replace(segment.path)


def _download(address: str, part: Path, done: int, size: int, progress: Progress) -> str:
    digest = hashlib.sha256()
    with _reaching(address), part.open("r+b" if done else "wb") as file:
        left = done
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        system, path = file_system(address)
        with system.open(path, "rb") as source:
            source.seek(done)
            progress(done)
            while done < size and (piece := source.read(min(PIECE_BYTES, size - done))):
                file.write(piece)
                digest.update(piece)
                done += len(piece)
                progress(len(piece))
        file.truncate(done)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _update(url: str, folder: Path) -> None:
    old = read_index(folder) if (folder / INDEX).is_file() else None
    text = _text(url, INDEX)
    if text is None:
        raise UserError("data.remote_no_index", url=url)
    staging = folder / ".new"
    staging.mkdir(exist_ok=True)
    (staging / INDEX).write_bytes(text)
    try:
        index = read_index(staging)
    except UserError as error:
        raise UserError("data.bad_meta", path=f"{url.rstrip('/')}/{INDEX}", reason=error.values["reason"]) from None
    known = {shard.file: shard.sha256 for split in index.splits.values() for shard in split.shards}
    for shard in [shard for split in old.splits.values() for shard in split.shards] if old else []:
        if known.get(shard.file) != shard.sha256:
            for path in (folder / shard.file, (folder / shard.file).with_suffix(".part")):
                path.unlink(missing_ok=True)
    if old is None or old.tokenizer.sha256 != index.tokenizer.sha256:
        _tokenizer_files(url, folder)
    (staging / INDEX).replace(folder / INDEX)


def _tokenizer_files(url: str, folder: Path) -> None:
    with _reaching(url):
        system, path = file_system(url)
        for entry in system.ls(path, detail=True):
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            plain = name != INDEX and not name.startswith(".") and not name.endswith((".bin", ".part"))
            if entry.get("type") == "file" and plain and (entry.get("size") or 0) <= _MAX_FILE_BYTES:
                (folder / name).write_bytes(system.cat_file(entry["name"]))


def _text(url: str, name: str) -> bytes | None:
    address = f"{url.rstrip('/')}/{name}"
    with _reaching(url):
        system, path = file_system(address)
        try:
            return system.cat_file(path)
        except FileNotFoundError:
            return None


def file_system(address: str) -> tuple[Any, str]:
    found: tuple[Any, str] = need_extra("fsspec.core", "data").url_to_fs(address)
    return found


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Make one sentence of a file system's errors: each has classes of its own, so all are caught."""
    try:
        yield
    except (UserError, FileNotFoundError):
        raise
    except ImportError:
        scheme = url.partition("://")[0]
        raise UserError("environment.no_file_system", url=url, package=_PACKAGES.get(scheme, scheme)) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == 28:
            raise UserError("disk.full_data", path=str(cache_folder())) from None
        raise _unreachable(url, error) from None


def _unreachable(url: str, error: Exception) -> UserError:
    text = (printable(str(error)).splitlines() or [""])[0][:200]
    return UserError("data.remote", url=url, reason=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _check_room(folder: Path, needs: int, url: str) -> None:
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise UserError("disk.no_room_to_fetch", url=url, needs=needs, free=free, path=str(folder))


def _evict(own: Path, needs: int) -> None:
    held: list[tuple[float, Path, int]] = []
    total = 0
    for folder in (each for each in own.parent.iterdir() if not each.is_symlink()):
        used = folder / _USED
        at = used.stat().st_mtime if used.is_file() else 0.0
        for path in (*folder.glob("*.bin"), *folder.glob("*.part")):
            size = path.stat().st_size
            total += size
            if folder != own:
                held.append((at, path, size))
    for _, path, size in sorted(held):
        if total + needs <= limit_bytes():
            return
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size
