"""Writes that survive a crash: every change that a run makes to its folder, one call at a time.

Whatever must survive is made of these calls, so that a test can stand at each of them: `watch` is given the call, its
path and its bytes before the call is made, and may count, wait, raise OSError or kill the process.
"""

import contextlib
import errno
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from foretrain.base.errors import UserError

CHUNK_BYTES = 1 << 20  # at most so much is written at a time
# How a file is opened that must be our own: not through a link, and without waiting for a pipe's reader.
OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

Watcher = Callable[[str, Path, int], None]
_watchers: list[Watcher] = []


def watch(watcher: Watcher | None) -> None:
    """Let `watcher` see every call before it is made; None: nobody."""
    _watchers[:] = [watcher] if watcher else []


def _about_to(call: str, path: Path, size_bytes: int = 0) -> None:
    for watcher in _watchers:
        watcher(call, path, size_bytes)


def make_folder(path: Path) -> None:
    _about_to("mkdir", path)
    path.mkdir()


def write(path: Path, pieces: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Write and sync a new file; (its bytes, the SHA-256 of what was meant to be in it). Raises OSError."""
    digest, size = hashlib.sha256(), 0
    _about_to("open", path)
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]
                _about_to("write", path, len(part))
                while part.nbytes:  # a nearly full disk takes a part
                    done = file.write(part)
                    digest.update(part[:done])
                    size, part = size + done, part[done:]
        _about_to("fsync", path)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file as it is on the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    _about_to("fsync", path)
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(path: Path, target: Path) -> None:
    """Give a file or folder another name."""
    _about_to("rename", path)
    path.rename(target)


def not_written(path: Path, error: OSError) -> UserError:
    """Return why a file that the user named could not be written."""
    if error.errno == errno.ENOSPC:
        return UserError("disk.full_output")
    if error.errno in (errno.EDQUOT, errno.EFBIG):
        return UserError("disk.limit_output")
    wrong = isinstance(error, (FileExistsError, IsADirectoryError, NotADirectoryError))
    wrong |= isinstance(error, FileNotFoundError) and not path.parent.is_dir()  # /proc is there, and takes no file
    id = "usage.cannot_write_file" if wrong else "environment.cannot_write"
    return UserError(id, path=str(path), reason=error.strerror or str(error))


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UserError 'environment.link' where one of these leads elsewhere: what lies there is not ours to change."""
    for path in paths:
        if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
            name = shlex.quote(str(path))
            command = f"mv {name} {name}.old"
            if path.is_file() or path.is_dir():
                command += f" && cp -rL {name}.old {name}"
            raise UserError("environment.link", path=str(path), command=command)


def remove_folder(path: Path) -> None:
    """Remove a folder and the files in it, or a link alone, as far as the system lets us; none is no error."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            _about_to("unlink", path)
            path.unlink()
        return
    with contextlib.suppress(OSError):
        for entry in sorted(path.iterdir()):
            if not entry.is_dir() or entry.is_symlink():
                _about_to("unlink", entry)
                entry.unlink()
    if path.exists():
        _about_to("rmdir", path)
        shutil.rmtree(path, ignore_errors=True)


def replace(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file so that a reader or a crash sees the old bytes or the new, never a part.

    Without `sync` the new ones may be lost with the power, which a cache can afford. Raises OSError.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _about_to("write", path, len(data))
            file.write(data)
            if sync:
                file.flush()
                _about_to("fsync", path)
                os.fsync(file.fileno())
        _about_to("rename", path)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """`replace` with a text."""
    replace(path, text.encode())


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a text file, all or none of them. Raises OSError."""
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    _about_to("append", path, len(rest))
    with open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags | OWN, 0o666)) as file:
        before = file.tell()
        try:
            while rest.nbytes:  # a nearly full disk takes a part
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise
