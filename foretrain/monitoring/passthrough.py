"""Runs a command as if nothing stood between it and the terminal: output, input, signals and exit code pass unchanged.

Where our output is a terminal the command gets a pseudo-terminal of the same size, so that its colours, progress bars
and line buffering stay; elsewhere it gets a pipe. Its input is our own. It has a process group of its own, so that a
signal reaches it once: from the terminal where that is its input (it is in the foreground then), else from us.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if sys.platform != "win32":
    import pty
    import termios

POSIX = os.name == "posix"
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
POLL_S = 0.05
DRAIN_S = 0.5  # how long after the command's end what it has started may still write
_CHUNK, _WAITING = 1 << 16, 64

Sink = Callable[[int, bytes], None]


class CommandStart(Exception):
    """The command cannot start; the text says why, as the end of a sentence."""


class Ended:
    """How a command ended: its exit code, or the signal that ended it; and what it used of the processors.

    `rusage` is of the command and of those of its children that were waited for; None where the system does not say.
    """

    def __init__(self, code: int, rusage: Any = None) -> None:
        self.signal = -code if code < 0 else 0
        self.code = 128 - code if code < 0 else code
        self.rusage = rusage


class _Stream:
    """One stream of the command's output, which a thread of its own passes on to ours, and to `told` afterwards."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target

    def begin(self, told: "queue.Queue[tuple[int, bytes]]") -> None:
        """Start; an empty piece is the end."""
        threading.Thread(target=self._run, args=(told,), daemon=True).start()

    def _run(self, told: "queue.Queue[tuple[int, bytes]]") -> None:
        with contextlib.suppress(OSError):  # a pseudo-terminal ends with EIO
            while data := os.read(self.source, _CHUNK):
                heard = self._pass_on(data)
                told.put((self.target, data))
                if not heard:  # the command is told by its next write, as it would be without us
                    break
        os.close(self.source)
        told.put((self.target, b""))

    def _pass_on(self, data: bytes) -> bool:
        """Write all of it; false where the reader has gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.target, view) :]
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                return False
        return True


class Passthrough:
    """One command, started at once. `run` returns when it has ended. Raises CommandStart."""

    def __init__(self, command: Sequence[str], *, out: int = 1, err: int = 2) -> None:
        self._terminal: int | None = None
        self._early: list[int] = []  # signals that came before the command was there
        self._pid = 0
        self._masters: dict[int, int] = {}  # our terminal -> the pseudo-terminal that stands for it
        environment = dict(os.environ)
        targets = self._targets(out, err)
        if not all(target in self._masters for target, _ in targets):
            environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would keep lines back, and lose them with a crash
        self.streams = [_Stream(read, target) for target, (read, _) in targets]
        ends = [write for _, (_, write) in targets]
        options: dict[str, Any] = {"process_group": 0} if POSIX else {}
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(self._forwarding())
        try:
            self.child = subprocess.Popen(
                list(command), stdout=ends[0], stderr=ends[-1], env=environment, close_fds=True, **options
            )
        except (OSError, ValueError) as error:
            self._signals.close()
            for stream in self.streams:
                os.close(stream.source)
            raise CommandStart(getattr(error, "strerror", None) or str(error)) from None
        finally:
            for end in ends:
                os.close(end)
        self._pid = self.child.pid
        self._give_terminal()
        for number in self._early:
            self._send(number)

    @property
    def pid(self) -> int:
        return self._pid

    # -- the terminal ------------------------------------------------------------------------------------------

    def _targets(self, out: int, err: int) -> list[tuple[int, tuple[int, int]]]:
        """[(our descriptor, (end to read, end for the command))]; one where both of ours are the same terminal."""
        same = os.isatty(out) and os.isatty(err) and os.path.samestat(os.fstat(out), os.fstat(err))
        return [(target, self._pair(target)) for target in ((out,) if same else (out, err))]

    def _pair(self, target: int) -> tuple[int, int]:
        if not (POSIX and os.isatty(target)):
            return os.pipe()
        master, slave = pty.openpty()
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST  # our terminal does to the output what has to be done, once
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self._masters[target] = master
        self._resize()
        return master, slave

    def _resize(self) -> None:
        for terminal, master in self._masters.items():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetwinsize(master, termios.tcgetwinsize(terminal))

    def _give_terminal(self) -> None:
        """Where our input is a terminal that we are in front of, the command is in front of it now."""
        with contextlib.suppress(OSError, AttributeError, ValueError):
            if POSIX and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                self._terminal = 0
                os.tcsetpgrp(0, self.pid)
                os.killpg(self.pid, signal.SIGCONT)  # it may have asked for input before

    def _take_terminal(self) -> None:
        if self._terminal is None:
            return
        old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # we are in the background as long as it is not ours
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self._terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, old)

    # -- signals -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """What is sent to us goes to the command's group; the terminal's size too."""
        old: dict[int, Any] = {}

        def forward(number: int, frame: Any) -> None:
            if self._pid:
                self._send(number)
            else:
                self._early.append(number)

        if threading.current_thread() is not threading.main_thread():  # only that one can have handlers
            yield
            return
        for name in FORWARDED:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, forward)
        if hasattr(signal, "SIGWINCH"):
            old[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self._resize())
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _send(self, number: int) -> None:
        if POSIX:  # Windows gives Ctrl-C to every process of the console by itself
            with contextlib.suppress(OSError):
                os.killpg(self._pid, number)

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, sink: Sink, tick: Callable[[], None] = lambda: None) -> Ended:
        """Pass everything on to the command's end. `sink` is told (our descriptor, bytes) of each piece after it was
        passed on; `tick` is called a few times a second."""
        told: queue.Queue[tuple[int, bytes]] = queue.Queue(_WAITING)
        ended: Ended | None = None
        open_streams, quiet_since_s = len(self.streams), 0.0
        with self._signals:
            for stream in self.streams:
                stream.begin(told)
            while ended is None or (open_streams and time.monotonic() - quiet_since_s < DRAIN_S):
                with contextlib.suppress(queue.Empty):
                    target, data = told.get(timeout=POLL_S)
                    quiet_since_s = time.monotonic()
                    open_streams -= not data
                    if data:
                        sink(target, data)
                if ended is None:
                    ended = self._look()
                    quiet_since_s = time.monotonic()
                tick()
        self._take_terminal()
        return ended

    def _look(self) -> Ended | None:
        """Whether the command has ended; when it was stopped from the terminal, so are we."""
        if not POSIX:
            code = self.child.poll()
            return None if code is None else Ended(code)
        pid, status, rusage = os.wait4(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            self._stop_too()
            return None
        self.child.returncode = os.waitstatus_to_exitcode(status)
        return Ended(self.child.returncode, rusage)

    def _stop_too(self) -> None:
        """The command was stopped, by Ctrl-Z or a signal: our shell has to see us stop. Then both go on."""
        if self._terminal is None:
            return
        self._take_terminal()
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self._terminal, self.pid)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGCONT)
