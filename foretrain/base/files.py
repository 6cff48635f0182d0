"""Bounded reads of others' files, and writes of own files that survive a crash."""

import contextlib
import errno
import hashlib
import io
import os
import pickle
import pickletools
import re
import shlex
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.base.errors import UserError
from foretrain.base.units import MIB, format_bytes

# Writes that survive a crash. A test can stand at each call: `watch` gets the call, its path and its bytes before it is
# made, and may count, wait, raise OSError or kill the process.

CHUNK_BYTES = 1 << 20  # at most so much is written at a time
# Open only our own file: not through a link, and without waiting for a pipe's reader.
OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

Watcher = Callable[[str, Path, int], None]
_watchers: list[Watcher] = []


def watch(watcher: Watcher | None) -> None:
    _watchers[:] = [watcher] if watcher else []


def _about_to(call: str, path: Path, size_bytes: int = 0) -> None:
    for watcher in _watchers:
        watcher(call, path, size_bytes)


def make_folder(path: Path) -> None:
    _about_to("mkdir", path)
    path.mkdir()


def write(path: Path, pieces: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Write and sync a new file; return its size and the SHA-256 of its intended content. Raises OSError."""
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    _about_to("fsync", path)
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(path: Path, target: Path) -> None:
    _about_to("rename", path)
    path.rename(target)


def not_written(path: Path, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError("disk.full_output")
    if error.errno in (errno.EDQUOT, errno.EFBIG):
        return UserError("disk.limit_output")
    wrong = isinstance(error, (FileExistsError, IsADirectoryError, NotADirectoryError))
    wrong |= isinstance(error, FileNotFoundError) and not path.parent.is_dir()  # /proc is there, and takes no file
    id = "usage.cannot_write_file" if wrong else "environment.cannot_write"
    return UserError(id, path=str(path), reason=error.strerror or str(error))


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UserError 'environment.link' if a path is a link: its target is not ours to change."""
    for path in paths:
        if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
            name = shlex.quote(str(path))
            command = f"mv {name} {name}.old"
            if path.is_file() or path.is_dir():
                command += f" && cp -rL {name}.old {name}"
            raise UserError("environment.link", path=str(path), command=command)


def remove_folder(path: Path) -> None:
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
    """Write a file so that readers see the old bytes or the new; without `sync` a power cut may lose the new."""
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


# Bounded reads of others' files: only regular ones, and none larger than expected. A shell's pipe, as from `<(…)`, is
# read as a file; named pipes, devices and endless files of /proc are refused.

# Objects of Python take up to 24 times the bytes of their JSON ('[],' is 3 bytes and 64), so this stays within 0.8 GiB.
JSON_BYTES = 32 * MIB
RECORD_BYTES = 4 * MIB  # plans, run records, manifests: a few kilobytes each; read twice, and made into records
_SHELL_PIPE = re.compile(r"/(dev|proc/(self|thread-self|\d{1,9}))/fd/\d{1,9}")
MAX_DOTS = 100  # in a line of TOML; the numbers and names of a config have a few


def read_bytes(path: Path, most_bytes: int = RECORD_BYTES, *, last_bytes: int = 0) -> bytes:
    """Return a file's bytes, or its `last_bytes`. Raises OSError for a pipe, a device or more than `most_bytes`."""
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
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    found = os.fstat(file)
    if stat.S_ISDIR(found.st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return file, found


def _kind(mode: int) -> str:
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


def open_stream(path: Path) -> BinaryIO:
    """Open a file, or a shell's pipe. Raises OSError for a device, a named pipe, and a /proc file that would block."""
    file, found = _opened(path)
    try:
        if stat.S_ISFIFO(found.st_mode) and _SHELL_PIPE.fullmatch(str(path)):
            os.set_blocking(file, True)
        elif not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, _kind(found.st_mode))
        elif not found.st_size:  # of /proc too, where it may be empty and reading may wait
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


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a regular file; b"" of anything else, as a pipe can be read but once."""
    try:
        if path.is_file():
            with open_stream(path) as file:
                return file.read(count)
    except (OSError, ValueError):
        pass
    return b""


def read_text(path: Path, most_bytes: int = RECORD_BYTES) -> str:
    """Return the UTF-8 text of a file. Raises OSError as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, most_bytes).decode("utf-8")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text, of limited form, as tomllib's time is quadratic in it. Raises ValueError, RecursionError."""
    if any(line.count(".") > MAX_DOTS for line in text.splitlines() if not line.lstrip().startswith("#")):
        raise ValueError(f"a line has more than {MAX_DOTS} dots")
    return tomllib.loads(text)


# Pickles of others, read as plain data: nothing in one can run. A name in the stream is refused, unless the caller maps
# it. A PUT with a huge memo index makes the unpickler allocate twice as many places, so nine bytes can ask for
# gigabytes. Each PUT takes two bytes of the file at least, so an index beyond the file's size is refused before
# loading.

# Length of an opcode's argument: bytes, or below 0 one of pickletools' codes.
_ARGUMENT_BYTES = {ord(op.code): op.arg.n if op.arg is not None else 0 for op in pickletools.opcodes}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip
_PUT, _BINARY_PUTS = pickle.PUT[0], {pickle.BINPUT[0], pickle.LONG_BINPUT[0]}
_TWO_LINES = {pickle.GLOBAL[0], pickle.INST[0]}  # a module and a name


class ForbiddenName(ValueError):
    """The pickle asks for this name."""


class _Reader(pickle.Unpickler):
    def __init__(
        self, data: bytes, allowed: Mapping[tuple[str, str], Any], outside: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._outside = allowed, outside

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in self._allowed:
            raise ForbiddenName(printable_name(f"{module[:60]}.{name[:60]}"))
        return self._allowed[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        if self._outside is None:
            raise ForbiddenName("something from outside")
        return self._outside(pid)


def printable_name(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


def load_pickle(
    data: bytes, allowed: Mapping[tuple[str, str], Any] | None = None, outside: Callable[[Any], Any] | None = None
) -> Any:
    """Load the plain values of a pickle. `allowed`: replacements of a module's names; `outside`: of a persistent id.
    Raises Asks; ValueError for an impossible memo; and almost any exception for damaged bytes.
    """
    _check_memo(data)
    return _Reader(data, allowed or {}, outside).load()


def _check_memo(data: bytes) -> None:
    """Raise ValueError for an impossible memo index; the unpickler handles what is not a pickle."""
    position, size = 0, len(data)
    while position < size:
        opcode = data[position]
        argument_bytes = _ARGUMENT_BYTES.get(opcode)
        if argument_bytes is None or opcode == pickle.STOP[0]:
            return
        start, position = position + 1, position + 1
        if argument_bytes >= 0:
            position += argument_bytes
            if opcode in _BINARY_PUTS:
                _check(int.from_bytes(data[start:position], "little"), size)
        elif argument_bytes == pickletools.UP_TO_NEWLINE:
            position = data.find(b"\n", start) + 1 or size
            if opcode in _TWO_LINES:
                position = data.find(b"\n", position) + 1 or size
            elif opcode == _PUT:  # the unpickler also reads +9 and 9_9, which nothing writes
                digits = data[start:position].strip()
                _check(int(digits) if digits.isdigit() and len(digits) < 20 else size, size)
        else:
            position += _LENGTH_BYTES[argument_bytes]
            position += int.from_bytes(data[start:position], "little")


def _check(place: int, size: int) -> None:
    if place >= size:
        raise ValueError("its memo has a place beyond the file's size, which no pickle needs")
