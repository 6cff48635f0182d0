"""Signals that end a process, also of batch systems: a flag that a training loop polls, or an exception."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

ENDING = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT", "SIGHUP")
    if hasattr(signal, name)
]


class Terminated(KeyboardInterrupt):
    """A signal that ends a command without another handler, with the signal's name."""


_process: list[int] = []


@contextlib.contextmanager
def raising_terminated() -> Iterator[None]:
    """Raise Terminated on signals that would end this process, not its children; not when a terminal closes."""
    main = threading.current_thread() is threading.main_thread()
    others = [number for number in ENDING if main and number.name not in ("SIGHUP", "SIGQUIT")]
    taken = [number for number in others if signal.getsignal(number) is signal.SIG_DFL]
    _process[:] = [os.getpid()]
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    if _process != [os.getpid()]:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    raise Terminated(signal.Signals(number).name)


def ends(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, _raise)


def heard() -> list[signal.Signals]:
    """Return the signals that would end this process: not those that nohup, a background shell or a caller handles."""
    usual = (signal.SIGINT, signal.SIGTERM)
    return [n for n in ENDING if (signal.getsignal(n) is not signal.SIG_IGN if n in usual else ends(n))]


class StopFlag:
    """Turn the first signal into `stopping`, and a second Ctrl-C into KeyboardInterrupt.

    A second SIGTERM adds nothing: batch systems send several. `ends_process`: the process is about to end after a stop,
    so a late SIGTERM must not take its exit code. `together`: one rank of several only notes what it was `asked`, and
    stops when all have agreed.
    """

    def __init__(self, *, together: bool = False) -> None:
        self.signal_name = self.asked = ""
        self.together = together
        self.ends_process = False
        self._old: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        return bool(self.signal_name)

    def request(self, name: str) -> None:
        self.asked = self.asked or name
        if not self.together:
            self.signal_name = self.asked

    def agree(self, name: str) -> None:
        self.signal_name = name

    def __enter__(self) -> "StopFlag":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in heard()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            late = self.ends_process and bool(self.stopping or self.asked) and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if late else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number in (signal.SIGINT, getattr(signal, "SIGQUIT", None)):
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
