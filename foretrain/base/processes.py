"""Python in a process of its own: a module of this very foretrain, frames both ways (JSON and a payload), and how it
ended. Plain subprocesses: nothing is pickled, and the user's script is never run again, as multiprocessing would on
Windows."""

import contextlib
import importlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from foretrain.base.errors import UserError

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

SOURCE = str(Path(__file__).parents[2])
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
PRINTED_BYTES = 20_000  # most of what a child printed that a Death has
_PIPE_BYTES = 2**20  # a frame goes through at once instead of in sixteen turns (Linux)
_HEAD = struct.Struct("<II")
_MOST_HEARD = 100  # frames that a child reads ahead; a parent that sends more waits
_ENDING_S = 1.0  # for a child to end once it has closed its pipe, and for its pipe to close once it has ended


class Frame(NamedTuple):
    value: Any
    payload: bytes = b""


def write(pipe: IO[bytes], value: Any, *parts: bytes | memoryview) -> None:
    text = json.dumps(value).encode()
    pipe.write(_HEAD.pack(len(text), sum(memoryview(part).nbytes for part in parts)))
    pipe.write(text)
    for part in parts:
        pipe.write(part)
    pipe.flush()


def read(pipe: IO[bytes]) -> Frame | None:
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text_bytes, payload_bytes = _HEAD.unpack(head)
    text, payload = pipe.read(text_bytes), pipe.read(payload_bytes)
    if len(text) < text_bytes or len(payload) < payload_bytes:
        return None
    return Frame(json.loads(text), payload)


@dataclass(frozen=True)
class ProcessExit:
    """The end of a child: its exit code, negative for a signal, and its last output."""

    code: int
    printed: str = ""

    @property
    def is_killed(self) -> bool:
        return self.code == -KILL


class Child:
    """`main(parent, *words)` of a module in a process of its own.

    `env`: variables beside this process's; `without`: those that it does not get. `log`: the file for its output;
    `prints`: to this process's output. `stdin`: a source of something other than frames, so it must not receive.
    `most_waiting`: unreceived frames before it has to wait; 0: any number.
    """

    def __init__(
        self,
        module: str,
        *words: str,
        env: dict[str, str] | None = None,
        without: Collection[str] = (),
        cwd: str | None = None,
        log: IO[bytes] | None = None,
        prints: bool = False,
        stdin: int | None = subprocess.PIPE,
        leads_group: bool = True,
        most_waiting: int = 0,
    ) -> None:
        self._log = log or tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        own = {name: value for name, value in (variables() | (env or {})).items() if name not in without}
        self.process = subprocess.Popen(
            command("foretrain.base.processes", module, *words), env=own, cwd=cwd, stdin=stdin,
            stdout=subprocess.PIPE, stderr=None if prints else self._log, start_new_session=leads_group,
        )  # fmt: skip
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and fcntl is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
                with contextlib.suppress(OSError):  # an unprivileged process may not exceed the system's limit
                    fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._frames: queue.Queue[Frame | None] = queue.Queue(most_waiting)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError), self.process.stdout as pipe:
            while (frame := read(pipe)) is not None:
                self._frames.put(frame)
        self._frames.put(None)

    def send(self, value: Any, *parts: bytes | memoryview) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            write(self.process.stdin, value, *parts)

    def receive(self, most_s: float | None = None) -> Frame | ProcessExit | None:
        try:
            frame = self._frames.get(timeout=most_s)
        except queue.Empty:
            return None
        if frame is not None:
            return frame
        self._frames.put(None)
        return self._ended()

    def __iter__(self) -> Iterator[Frame]:
        while isinstance(found := self.receive(), Frame):
            yield found

    def _ended(self) -> ProcessExit:
        try:
            code = self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            code = self.end()
        with contextlib.suppress(OSError, ValueError):  # it is closed, or only to be written
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - PRINTED_BYTES))
            return ProcessExit(code, self._log.read().decode("utf-8", "replace"))
        return ProcessExit(code)

    def end(self, grace_s: float = 0.0) -> int:
        """End it with all that it started; return its exit code. `grace_s`: the time between SIGTERM and SIGKILL."""
        if grace_s:
            send(self.process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        code = end(self.process)
        while self._listener.is_alive() or not self._frames.empty():  # it may wait for room
            with contextlib.suppress(queue.Empty):
                self._frames.get(timeout=0.01)
        self._frames.put(None)
        self._log.close()
        return code


def end_group() -> None:
    if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
        os.killpg(0, KILL)
    os._exit(1)


class Parent:
    """The parent process, for `main` of a child's module. `gone`: called when it has ended."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a Windows terminal; the parent decides
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what libraries print is not a frame
        self._frames: queue.Queue[Frame | None] = queue.Queue(_MOST_HEARD)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self.gone: Callable[[], None] = end_group

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (frame := read(sys.stdin.buffer)) is not None:
                self._frames.put(frame)
        self.gone()
        self._frames.put(None)

    def receive(self) -> Frame | None:
        if not self._listener.ident:
            self._listener.start()
        return self._frames.get()

    @property
    def has_frames(self) -> bool:
        return not self._frames.empty()

    def send(self, value: Any, *parts: bytes | memoryview) -> None:
        try:
            write(self._out, value, *parts)
        except OSError:
            self.gone()


def main(module: str, *words: str) -> NoReturn:
    """Run a module's `main` in the child, and end without a library's exit handlers."""
    code = 1
    try:
        importlib.import_module(module).main(Parent(), *words)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def need_fork(what: str) -> None:
    """Raise UserError 'environment.no_fork' on Windows, where processes cannot be forked nor grouped."""
    if not hasattr(os, "fork"):
        raise UserError("environment.no_fork", what=what)


def search_path() -> str:
    return os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))


def command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module. -P: nothing is imported from the working directory."""
    return [sys.executable, "-P", "-m", module, *words]


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": search_path()}


def heeding(reader: int) -> dict[str, Any]:
    """Return options of a child which ends when its pipe closes (not on Windows), and that a Ctrl-C does not reach."""
    return {"pass_fds": (reader,), "start_new_session": True} if os.name == "posix" else {}


def finished(module: str, *words: str, most_s: float) -> subprocess.CompletedProcess[bytes]:
    """Return the output of a module that reads a foreign file. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        command(module, *words), stdin=subprocess.DEVNULL, capture_output=True, timeout=most_s, check=False,
        env=variables(),
    )  # fmt: skip


def starts(module: str, most_s: float = 120.0) -> bool:
    """Return whether a module can be imported, in a process of its own."""
    words = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        return not subprocess.run(words, capture_output=True, timeout=most_s, check=False, env=variables()).returncode
    except subprocess.TimeoutExpired:
        return False


def send(process: subprocess.Popen[Any], number: int) -> None:
    """Signal a process and all that it started; where there are no groups, end the process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.terminate()


def end(process: subprocess.Popen[Any]) -> int:
    send(process, KILL)
    process.kill()  # it may lead no group
    code = process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return code


def limit(*, memory_bytes: int | None = None, file_bytes: int | None = None, processor_s: int | None = None) -> None:
    if resource is None:
        return
    most = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CPU: processor_s}
    for kind, value in most.items():
        if value is not None:
            _, hard = resource.getrlimit(kind)
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (least, least))


if __name__ == "__main__":
    main(*sys.argv[1:])
