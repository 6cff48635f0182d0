"""Files of others, read whole but never without end: only regular ones, and none larger than what is expected there."""

import errno
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from foretrain.units import MIB, format_bytes

# Objects of Python take up to 24 times the bytes of their JSON ('[],' is 3 bytes and 64), so this stays within 0.8 GiB.
JSON_BYTES = 32 * MIB
RECORD_BYTES = 4 * MIB  # plans, run records, manifests: some kilobytes each; read twice, and made into records
MAX_DOTS = 100  # in a line of TOML; the numbers and names of a config have a few


def read_bytes(path: Path, most_bytes: int = RECORD_BYTES, *, last_bytes: int = 0) -> bytes:
    """The bytes of a file; with `last_bytes`, so many from its end. Raises OSError with a sentence for a pipe, a device
    or a file beyond `most_bytes`.

    Opened without waiting: a pipe nobody writes to, or a file of /proc that blocks, would be waited for without end.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        if last_bytes:
            os.lseek(file, max(0, found.st_size - last_bytes), os.SEEK_SET)
        pieces, left = [], most_bytes + 1
        while left and (piece := os.read(file, min(left, MIB))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(file)
    if not left:
        raise OSError(errno.EFBIG, f"it is larger than {format_bytes(most_bytes)}")
    return b"".join(pieces)


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
