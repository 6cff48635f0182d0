"""Others' libraries while lm-eval works: what they print, and whether they may wait for a network.

lm-eval prints and logs freely, draws bars, and starts processes; datasets and huggingface_hub ask the network for a
minute before they say that there is none.
"""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, TextIO
from urllib.parse import urlsplit

from foretrain.base.later import Later

_constants: Any = Later("huggingface_hub.constants")
_READS_FLAG = ("huggingface_hub.constants", "datasets.config")  # where HF_HUB_OFFLINE is looked up
_LOGGERS = ("lm_eval", "datasets", "evaluate", "transformers", "huggingface_hub", "filelock")
# lm-eval's bootstrap stays in this process: others would be forks of one that runs torch.
_VARIABLES = {"DISABLE_MULTIPROC": "1", "TRANSFORMERS_VERBOSITY": "error"}
_TIMEOUT_S = 5.0  # of the first contact with the Hub


@contextlib.contextmanager
def quiet(*, bars: bool) -> Iterator[None]:
    """What lm-eval prints goes to stderr, and of what is logged only errors are told. Without `bars` none are drawn."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(_VARIABLES)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    shown: Any = sys.stderr if bars else _WithoutBars(sys.stderr)
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _WithoutBars:
    """A stream that leaves out the bars of tqdm, each of which begins with a carriage return, and what ends them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._in_bar = stream, False

    def write(self, text: str) -> int:
        if text.startswith("\r"):
            self._in_bar = True
        elif text.strip():
            self._in_bar = False
        if not self._in_bar:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def offline_without_network() -> Iterator[None]:
    """Where the Hub cannot be reached, its libraries take what is in their cache at once, and do not try again and
    again. A proxy is asked by them alone."""
    if _reached():
        yield
        return
    flags = [(module, module.HF_HUB_OFFLINE) for module in map(import_module, _READS_FLAG)]
    try:
        for module, _ in flags:
            module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        yield
    finally:
        for module, value in flags:
            module.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]


def _reached() -> bool:
    """Whether the Hub takes a connection; True where that is not for this process to find out."""
    if _constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(_constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "")[:200].rstrip(".") or type(error).__name__
