"""Files of others, read but never without end: only regular ones, and none larger than what is expected there.

A pipe that the shell made for this command, as `<(…)` does, is read as a file; a pipe with a name, a device and a file
of /proc that has no end are refused.
"""

import errno
import io
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.base.units import MIB, format_bytes

# Objects of Python take up to 24 times the bytes of their JSON ('[],' is 3 bytes and 64), so this stays within 0.8 GiB.
JSON_BYTES = 32 * MIB
RECORD_BYTES = 4 * MIB  # plans, run records, manifests: some kilobytes each; read twice, and made into records
_SHELL_PIPE = re.compile(r"/(dev|proc/(self|thread-self|\d{1,9}))/fd/\d{1,9}")
MAX_DOTS = 100  # in a line of TOML; the numbers and names of a config have a few


def read_bytes(path: Path, most_bytes: int = RECORD_BYTES, *, last_bytes: int = 0) -> bytes:
    """The bytes of a file; with `last_bytes`, so many from its end. Raises OSError with a sentence for a pipe, a device
    or a file beyond `most_bytes`.

    Opened without waiting: a pipe nobody writes to, or a file of /proc that blocks, would be waited for without end.
    """
    file, found = _opened(path)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, _kind(found.st_mode))
        if last_bytes:
            os.lseek(file, max(0, found.st_size - last_bytes), os.SEEK_SET)
        return _all(file, most_bytes)
    finally:
        os.close(file)


def _opened(path: Path) -> tuple[int, os.stat_result]:
    """(descriptor, what it is) of a path that is not a folder."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    found = os.fstat(file)
    if stat.S_ISDIR(found.st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return file, found


def _kind(mode: int) -> str:
    """Why what is not a regular file is not read."""
    if stat.S_ISFIFO(mode):
        return "it is a pipe; give - in its place, and the pipe as < PIPE"
    return "it is a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "it is not a file"


def _all(file: int, most_bytes: int) -> bytes:
    pieces, left = [], most_bytes + 1
    while left and (piece := os.read(file, min(left, MIB))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise OSError(errno.EFBIG, f"it is larger than {format_bytes(most_bytes)}")
    return b"".join(pieces)


def _is_shell_pipe(path: Path) -> bool:
    return bool(_SHELL_PIPE.fullmatch(str(path)))


def open_stream(path: Path) -> BinaryIO:
    """A file, or a pipe that the shell made, to be read from its beginning. Whoever reads it bounds how much.

    Raises OSError with a sentence for a device, a pipe with a name, and a file of /proc that would be waited for.
    """
    file, found = _opened(path)
    try:
        if stat.S_ISFIFO(found.st_mode) and _is_shell_pipe(path):
            os.set_blocking(file, True)
        elif not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, _kind(found.st_mode))
        elif not found.st_size:  # of /proc as well, where it says nothing, and reading may wait
            try:
                held = _all(file, JSON_BYTES)
            except BlockingIOError:
                raise OSError(errno.EINVAL, "it is a device") from None
            os.close(file)
            return io.BufferedReader(io.BytesIO(held))
        return os.fdopen(file, "rb")
    except OSError:
        os.close(file)
        raise


def head(path: Path, count: int) -> bytes:
    """The first bytes of a regular file; b"" of anything else, as a pipe can be read but once."""
    try:
        return b"" if not path.is_file() else _head(path, count)
    except (OSError, ValueError):
        return b""


def _head(path: Path, count: int) -> bytes:
    with open_stream(path) as file:
        return file.read(count)


def read_text(path: Path, most_bytes: int = RECORD_BYTES) -> str:
    """The UTF-8 text of a file. Raises OSError as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, most_bytes).decode("utf-8")


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says. Raises ValueError (TOMLDecodeError is one), RecursionError.

    tomllib's time grows with the square of a key's parts, and tables nested by the thousand cannot be shown or copied.
    """
    if any(line.count(".") > MAX_DOTS for line in text.splitlines() if not line.lstrip().startswith("#")):
        raise ValueError(f"a line has more than {MAX_DOTS} dots")
    return tomllib.loads(text)
