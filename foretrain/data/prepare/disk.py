"""Every byte that a preparation writes goes through here: whole writes, fsync, and files that appear at once.

A full disk is one sentence with what is needed and what is free (B.4 of the fault table: ENOSPC, EDQUOT, EFBIG).
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from foretrain.base.durable import OWN, sync_folder
from foretrain.base.errors import UserError

_PIECE_BYTES = 2**20
_write = os.write  # what tests stand in for


def open_file(path: Path, *, empty: bool = False) -> int:
    """A file to read and write, made where it is not there; a link is refused."""
    flags = os.O_RDWR | os.O_CREAT | OWN | getattr(os, "O_BINARY", 0) | (os.O_TRUNC if empty else 0)
    return os.open(path, flags, 0o644)


def write_all(handle: int, data: bytes | bytearray | memoryview) -> None:
    """All of `data` to an open file; a short write is continued."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[_write(handle, view) :]


def publish(path: Path, text: Iterable[str]) -> None:
    """A file with the pieces of a text, there as a whole or as it was before."""
    staging = path.with_name(f".{path.name}.new")
    handle = open_file(staging, empty=True)
    try:
        waiting = bytearray()
        for piece in text:
            waiting += piece.encode()
            if len(waiting) >= _PIECE_BYTES:
                write_all(handle, waiting)
                waiting = bytearray()
        write_all(handle, waiting)
        os.fsync(handle)
    except BaseException:
        os.close(handle)
        staging.unlink(missing_ok=True)  # what it took is free again
        raise
    os.close(handle)
    staging.replace(path)
    sync_folder(path.parent)


def free_bytes(folder: Path) -> int:
    """What can still be written where `folder` is, or will be; 0 where that cannot be asked."""
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            try:
                return shutil.disk_usage(place).free
            except OSError:
                return 0
    return 0


def as_user_error(error: OSError, folder: Path, needs_bytes: int) -> UserError:
    """What a failed write means to the user; `needs_bytes` is what is still to be written, as far as known."""
    if error.errno in (errno.EDQUOT, errno.EFBIG):
        reason = error.strerror or str(error)
        return UserError(
            "disk.limit_prepare", path=str(folder), reason=reason, needs=needs_bytes, free=free_bytes(folder)
        )
    if error.errno == errno.ENOSPC:
        return UserError("disk.full_prepare", path=str(folder), needs=needs_bytes, free=free_bytes(folder))
    return UserError("environment.cannot_write", path=str(folder), reason=error.strerror or str(error))
