"""Redaction of private data, and the report of a fault of foretrain itself."""

import os
import platform
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from foretrain.base.errors import UserError
from foretrain.base.installation import cache_folder, installed

_HIDDEN = "…"
# A name that ends in `token` holds a secret, except a vocabulary's; so does one with any of _KEYS in it.
_VOCABULARY = (
    r"(?:[\w.-]*[-_.])?(?:pad|eos|bos|unk|mask|sep|cls|image|video|audio|start|end|stop|special|first|last|next)"
    r"[-_]?token(?![\w.-])"
)
_KEYS = (
    r"passw|passphrase|pwd|secret|credential|auth(?!or(?!i[sz]))|cookie|dsn|signature|(?<![a-z])sig(?![a-z])|connection[-_.]?string|webhook"
    r"|(?:api|access|private|account|storage|encryption|signing|hf|hub|github|wandb|comet|neptune|clearml)[-_.]?key"
)
_NAME = rf"(?<![\w.-])(?!{_VOCABULARY})[\w.-]*(?:token|(?:{_KEYS})[\w.-]*)(?![\w.-])"
# Patterns are compiled when something is redacted: that takes as long as reading the config of a plan.
_OPTION = rf"(?i)(?=-){_NAME}"
_WHOLE = rf"(?is)({_NAME}=).*"
_WITHIN = (
    rf"(?i)({_NAME}[\"']?\s*[=:]\s*|(?=-){_NAME}\s+)(?:(?:bearer|basic|token)\s+)?(?:\"[^\"]*\"?|'[^']*'?|[^\s&;,\"']+)"
)
_ADDRESS = r"(://)(?:[^\s/@:]*:[^\s@]+|[^\s/@]+)@"  # user:password@host, and token@host
_BEARER = r"(?i)(\bbearer\s+)[^\s\"']+"
_VALUE = (  # what tokens and keys of well-known services look like
    r"(?s)(?<![A-Za-z0-9_-])(?:"
    r"(?:hf|api_org|gh[opsur]|github_pat|npm|dckr_pat|gsk|r8|lsv2|wandb_v1)_[A-Za-z0-9_]{10,}(?![\w.-])"
    r"|(?:sk|rk|pk|glpat|pypi|xox[abeprs]|xapp|nvapi|rpa)-[\w-]{10,}|sk_(?:live|test)_\w+"
    r"|A(?:KI|SI|ID|RO)A[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]+|eyJ[\w-]{10,}\.[\w.-]+"
    r"|[0-9a-f]{40}(?![0-9a-zA-Z_]))"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*"
)
_REVISION = r"[0-9a-f]{40}"  # also what a commit looks like, which a message may name


def redacted(command: Sequence[str]) -> tuple[str, ...]:
    words: list[str] = []
    hide = False
    for word in command:
        words.append(_HIDDEN if hide else _redacted(word))
        hide = bool(re.fullmatch(_OPTION, word))
    return tuple(words)


def redacted_message(text: str) -> str:
    shown = re.sub(_VALUE, lambda found: found[0] if re.fullmatch(_REVISION, found[0]) else _HIDDEN, text)
    return re.sub(r"(://)[^\s/@:]*:[^\s/@]+@", rf"\g<1>{_HIDDEN}@", shown)


def without_password(address: str) -> str:
    """Refuse an address that holds a secret, as records and messages name it. Raises UserError."""
    shown = redacted((address,))[0]
    user = address.partition("://")[2].partition("@")[0]
    if shown != address and (":" in user or "=" in address or re.search(_VALUE, user)):
        raise UserError("usage.secret_in_address", address=shown)
    return address


def _redacted(word: str) -> str:
    if whole := re.fullmatch(_WHOLE, word):
        return f"{whole[1]}{_HIDDEN}"
    for pattern in (_WITHIN, _BEARER):
        word = re.sub(pattern, rf"\g<1>{_HIDDEN}", word)
    return re.sub(_VALUE, _HIDDEN, re.sub(_ADDRESS, rf"\g<1>{_HIDDEN}@", word))


# A bug of foretrain's own in one sentence: what went wrong, at which line, and the file with traceback, versions and
# command line. FORETRAIN_DEBUG=1 shows the traceback on the spot.

DEBUG = "FORETRAIN_DEBUG"
PACKAGE = Path(__file__).parents[1]


def unexpected_error(error: BaseException) -> UserError:
    if isinstance(error, MemoryError):
        return UserError("memory.computer")
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(frame.f_globals.get("__name__") == "torch" and frame.f_code.co_name == "<module>" for frame in frames):
        return UserError("environment.verify_torch", torch=installed("torch"))
    name, where, path = type(error).__name__, _where(error), _write_traceback(error)
    if path is None:
        return UserError("internal.bug_unwritten", type=name, where=where)
    return UserError("internal.bug", type=name, where=where, path=path)


def wants_traceback() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")


def in_child(work: Callable[[], None]) -> None:
    try:
        work()
    except UserError:
        raise
    except Exception as error:
        _end(error)


def _end(error: Exception) -> NoReturn:
    if wants_traceback():
        raise error
    found = unexpected_error(error)
    sys.stderr.write(f"{found}\n")
    sys.exit(int(found.exit_code))


def watch_threads() -> None:
    def tell(ended: threading.ExceptHookArgs) -> None:
        if isinstance(ended.exc_value, Exception) and sys.stderr is not None:
            sys.stderr.write(f"{unexpected_error(ended.exc_value)}\n")

    threading.excepthook = threading.__excepthook__ if wants_traceback() else tell


def _where(error: BaseException) -> str:
    """Return foretrain's last line that was running, relative to the package, as users' paths are private."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    if not ours:
        return "?"
    return f"{Path(ours[-1].filename).relative_to(PACKAGE.parent).as_posix()}:{ours[-1].lineno}"


def _write_traceback(error: BaseException) -> str | None:
    version = installed("foretrain") or "(not installed)"
    text = "\n".join(
        [
            f"foretrain {version}, Python {platform.python_version()}, {platform.platform()}",
            f"command: {' '.join(redacted(sys.argv))}", "",
            redacted_message("".join(traceback.format_exception(error))),
        ]
    )  # fmt: skip
    return write_text_file(text, "bug")


def write_text_file(text: str, what: str) -> str | None:
    name = f"{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}.txt"
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
