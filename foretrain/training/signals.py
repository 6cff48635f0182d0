"""Ctrl-C and SIGTERM set a flag that the loop polls: the step is finished, the state is saved, then the run stops."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopFlag:
    """Context manager that turns the first signal into `stopping`, and a second Ctrl-C into KeyboardInterrupt.

    A second SIGTERM asks for nothing else than the first: batch systems send several. `ends_process`: after a stop the
    process is about to end, so a late SIGTERM must not take its exit code.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.ends_process = False
        self._old: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        return bool(self.signal_name)

    def request(self, name: str) -> None:
        """Ask for a stop, as a signal does."""
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
            late = self.ends_process and self.stopping and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if late else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = self.signal_name or signal.Signals(number).name
