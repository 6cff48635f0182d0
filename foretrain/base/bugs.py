"""A bug of foretrain's own, told in one sentence: what went wrong, at which line, and the file that holds the rest.

The traceback is for whoever fixes it, so it goes into a file of the user's, with the versions and the command line.
FORETRAIN_DEBUG=1 shows it on the spot.
"""

import os
import platform
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from foretrain.base.errors import UserError
from foretrain.base.installation import cache_folder
from foretrain.base.redaction import redacted, redacted_message

DEBUG = "FORETRAIN_DEBUG"
PACKAGE = Path(__file__).parents[1]


def told(error: BaseException) -> UserError:
    """The sentence of an error that nobody expected; its traceback is in the file that the sentence names."""
    if isinstance(error, MemoryError):
        return UserError("memory.computer")
    name, where, path = type(error).__name__, _where(error), _kept(error)
    if path is None:
        return UserError("internal.bug_unwritten", type=name, where=where)
    return UserError("internal.bug", type=name, where=where, path=path)


def wants_traceback() -> bool:
    """Whether the user asked for the traceback itself."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def in_child(work: Callable[..., None], *words: str) -> None:
    """Do the work of a child process; of a bug, its sentence is printed on stderr, and the process ends with 1."""
    try:
        work(*words)
    except UserError:
        raise
    except Exception as error:
        _end(error)


def _end(error: Exception) -> NoReturn:
    if wants_traceback():
        raise error
    found = told(error)
    sys.stderr.write(f"{found}\n")
    sys.exit(int(found.exit_code))


def watch_threads() -> None:
    """From now on a thread that dies of a bug says its sentence instead of a traceback."""

    def tell(ended: threading.ExceptHookArgs) -> None:
        if isinstance(ended.exc_value, Exception) and sys.stderr is not None:
            sys.stderr.write(f"{told(ended.exc_value)}\n")

    threading.excepthook = threading.__excepthook__ if wants_traceback() else tell


def _where(error: BaseException) -> str:
    """The line that was running: foretrain's last one, from the package on, as paths of users are their own."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    if not ours:
        return "?"
    return f"{Path(ours[-1].filename).relative_to(PACKAGE.parent).as_posix()}:{ours[-1].lineno}"


def _kept(error: BaseException) -> str | None:
    """The path of the file that the traceback was written to; None where nothing can be written."""
    text = "\n".join(
        [
            f"foretrain {_version()}, Python {platform.python_version()}, {platform.platform()}",
            f"command: {' '.join(redacted(sys.argv))}", "",
            redacted_message("".join(traceback.format_exception(error))),
        ]
    )  # fmt: skip
    return keep(text, "bug")


def keep(text: str, what: str) -> str | None:
    """The path of a new file with this text, for who wants all of it; None where nothing can be written.

    `what`: the first word of its name.
    """
    name = f"{what}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.txt"
    for folder in (cache_folder() / "bugs", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def _version() -> str:
    try:
        return metadata.version("foretrain")
    except metadata.PackageNotFoundError:
        return "(not installed)"
