"""Ctrl-C and SIGTERM set a flag that the loop polls: the step is finished, the state is saved, then the run stops."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopFlag:
    """Context manager that turns the first signal into `stopping`, and a second Ctrl-C into KeyboardInterrupt.

    A second SIGTERM asks for nothing else than the first: batch systems send several. `ends_process`: after a stop the
    process is about to end, so a late SIGTERM must not take its exit code. `together`: one rank of several only notes
    what it was `asked`, and stops when all have agreed on it.
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
        """Ask for a stop, as a signal does."""
        self.asked = self.asked or name
        if not self.together:
            self.signal_name = self.asked

    def agree(self, name: str) -> None:
        """Stop, as all ranks do."""
        self.signal_name = name

    def __enter__(self) -> "StopFlag":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background shells have it
                    self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            late = self.ends_process and bool(self.stopping or self.asked) and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if late else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
