"""Single keys from the terminal, without waiting for Enter."""

import os
import re
import select
import sys
import time
from types import TracebackType
from typing import Any, Self

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = tty = None
try:
    import msvcrt
except ImportError:
    msvcrt = None

_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*[@-~]")  # what an arrow or a function key sends


class Keys:
    """Keys as they are pressed, inside a `with`. `heard`: whether there is a terminal to hear them from."""

    def __init__(self) -> None:
        self.heard = sys.stdin.isatty() and (termios is not None or msvcrt is not None)
        self._before: Any = None
        self._typed = ""  # and not asked for yet

    def __enter__(self) -> Self:
        if self.heard and termios is not None and tty is not None:
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None and termios is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def next(self, wait_s: float) -> str:
        """The next key, "" if none comes so soon; "q" where nobody can press one any more."""
        if not self.heard:
            time.sleep(wait_s)
            return ""
        if termios is None:
            return self._next_of_windows(wait_s)
        if not self._typed and select.select([sys.stdin], [], [], wait_s)[0]:
            read = os.read(sys.stdin.fileno(), 1024)
            if not read:
                return "q"
            self._typed = _SEQUENCE.sub("", read.decode("utf-8", "replace")).lower()
        key, self._typed = self._typed[:1], self._typed[1:]
        return key

    def _next_of_windows(self, wait_s: float) -> str:
        end_s = time.monotonic() + wait_s
        while msvcrt is not None and time.monotonic() < end_s:
            if msvcrt.kbhit():  # type: ignore[attr-defined]
                return msvcrt.getwch().lower()  # type: ignore[attr-defined]
            time.sleep(0.02)
        return ""
