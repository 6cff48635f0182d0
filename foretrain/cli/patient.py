"""Output of a long run whose reader may go away: a closed terminal, a pipe that ends, a log on a full disk.

None of it ends the run. What is printed is in the run's own files too.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class Patient:
    """A stream that goes quiet when its reader is gone. `any_error`: nor does any other error come out."""

    def __init__(self, stream: TextIO, *, any_error: bool) -> None:
        self._stream, self._any_error = stream, any_error

    def write(self, text: str) -> int:
        with self._quiet():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._quiet():
            self._stream.flush()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:  # what is in the buffers has to go somewhere at the end
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            elif not self._any_error:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def patient_output() -> Iterator[None]:
    """SIGHUP is ignored and stdout and stderr are patient, for as long as this lasts."""
    old = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, Patient(old[0], any_error=False))
    sys.stderr = cast(TextIO, Patient(old[1], any_error=True))
    try:
        with hangup_ignored():
            yield
    finally:
        sys.stdout, sys.stderr = old


@contextlib.contextmanager
def hangup_ignored() -> Iterator[None]:
    """Unless somebody wants it for something else, SIGHUP does nothing; processes begun meanwhile inherit that."""
    number = getattr(signal, "SIGHUP", None)
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(number, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)
