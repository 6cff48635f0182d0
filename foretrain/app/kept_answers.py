"""Printed answers of the planner, kept on disk by a hash of all that decided them, so that the command line repeats
them and imports almost nothing. Answers by this machine's devices, stdin, weights, a mixture or the user's own cards
are not kept."""

import contextlib
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from foretrain.base.installation import Later, cache_folder

caches: Any = Later("foretrain.base.cache")  # to repeat an answer needs nothing of ours
FOLDER, MOST_FILES, MOST_BYTES = "answers", 300, 1 << 20  # of some kilobytes each
PACKAGE = Path(__file__).parents[1]
_GZIP = 31  # as base/cache.py has it
_COARSE_NS = 2 * 10**9  # a file system may keep dates by two seconds
_OF_NO_ANSWER = ("_", "OLDPWD", "SHLVL")  # which a shell changes with every command


@cache
def code(package: Path = PACKAGE) -> str:
    """Return a hash of our code and tables. A file of another size or date is another one, as for Python's bytecode."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(package):
        folders.sort()
        for file in sorted(files):
            if file.endswith((".py", ".toml")):
                found = os.stat(f"{folder}/{file}")  # noqa: PTH116
                digest.update(f"{folder}/{file} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def state(path: str) -> list[list[Any]]:
    """Return what changes when a file does, or a file within a folder; [] where there is none. Raises OSError."""
    try:
        found = [_marks(path)]
        if os.path.isdir(path):  # noqa: PTH112
            found += sorted(_marks(each.path) for each in os.scandir(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    return found


def _marks(path: str) -> list[Any]:
    try:
        found = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        found = os.lstat(path)  # a link to nothing yet
    return [path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _tried(call: Callable[[Any], Any], of: object) -> Any:
    try:
        return call(of)
    except OSError:
        return None


def path_of() -> Path:
    """Return where the answer to this process's command line is kept."""
    environment = sorted(each for each in os.environ.items() if each[0] not in _OF_NO_ANSWER)
    shown = [(each.isatty(), each.encoding) for each in (sys.stdout, sys.stderr)]
    sizes = [_tried(os.get_terminal_size, number) for number in range(3)]
    listed = (_tried(os.listdir, folder or ".") or () for folder in sys.path)
    installed = sys.version, [sorted(each for each in names if each.endswith("-info")) for names in listed]
    asked = repr((code(), sys.argv[1:], os.getcwd(), environment, shown, sizes, installed))  # noqa: PTH109
    return cache_folder() / FOLDER / f"{hashlib.sha256(asked.encode('utf-8', 'replace')).hexdigest()[:20]}.json.gz"


def repeat() -> bool:
    """Print the answer to this command line as it was printed; return whether it is kept and still right."""
    try:
        if not (kept := path_of()).is_file():  # but a pipe, which would have us wait
            return False
        with kept.open("rb") as file:
            data = zlib.decompressobj(_GZIP).decompress(file.read(MOST_BYTES), MOST_BYTES)
        files, notes, printed = json.loads(data)
        if any(state(path) != before for path, before in files.items()):
            return False
        for text, stream in ((notes, sys.stderr), (printed, sys.stdout)):
            stream.write(text)
            stream.flush()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, zlib.error):  # the program says what failed
        return False
    return True


def keep(files: Iterable[Path], notes: str, printed: str, began_ns: int) -> None:
    """Keep what was printed, unless one of the files that decided it may have changed meanwhile."""
    with contextlib.suppress(OSError):
        found = {str(path): state(str(path)) for path in files}
        if all(max(marks[-2:]) + _COARSE_NS < began_ns for each in found.values() for marks in each):
            kept = caches.Cache(FOLDER, compressed=True, most_bytes=MOST_BYTES, most_files=MOST_FILES)
            kept.write(path_of(), json.dumps([found, notes, printed]))
