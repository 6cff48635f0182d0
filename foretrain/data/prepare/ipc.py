"""Child processes that talk in frames over pipes: a JSON header and a payload of bytes.

Plain subprocesses instead of multiprocessing: nothing is pickled, the user's script is never run again (nanoGPT's
endless loop on Windows, issue 153), and a child whose parent was killed sees its pipe end and goes.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.base import apart
from foretrain.base.errors import UserError

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 2**20  # a batch goes through at once instead of in sixteen turns (Linux)
_HEAD = struct.Struct("<II")


def send(pipe: BinaryIO, header: dict[str, Any], *parts: bytes | memoryview) -> None:
    """Write one frame; its payload is the parts one after the other."""
    text = json.dumps(header).encode()
    pipe.write(_HEAD.pack(len(text), sum(memoryview(part).nbytes for part in parts)))
    pipe.write(text)
    for part in parts:
        pipe.write(part)
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next frame, or None where the other side has ended, in the middle of a frame too."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text_bytes, payload_bytes = _HEAD.unpack(head)
    text, payload = pipe.read(text_bytes), pipe.read(payload_bytes)
    if len(text) < text_bytes or len(payload) < payload_bytes:
        return None
    return json.loads(text), payload


class Child:
    """`foretrain.data.prepare.<module>.main(*words)` in a process of its own."""

    def __init__(self, module: str, *words: str, stdin: int | None = subprocess.PIPE, one_thread: bool = True) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from foretrain.base import bugs; "
            f"from foretrain.data.prepare.{module} import main; bugs.in_child(main, *sys.argv[1:])"
        )
        # Arrow and glibc reserve address space by thread and pool; the limit of `limit_memory` is on that.
        quiet = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        if one_thread:
            names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
            quiet |= {"TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(names, "1")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *words], stdin=stdin, stdout=subprocess.PIPE, env={**os.environ, **quiet}
        )
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and fcntl is not None:
                with contextlib.suppress(OSError):  # as unprivileged users may not beyond a limit of the system's
                    fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)

    def ask(self, header: dict[str, Any], *parts: bytes | memoryview) -> tuple[dict[str, Any], bytes] | None:
        """Send a frame and wait for the answer; None where the child has died."""
        assert self.process.stdin is not None
        try:
            send(self.process.stdin, header, *parts)  # type: ignore[arg-type]
        except (BrokenPipeError, OSError, ValueError):
            return None
        return self.next()

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame of the child; an error that it sent is raised here."""
        assert self.process.stdout is not None
        try:
            frame = receive(self.process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError):
            return None
        if frame is not None and frame[0]["type"] == "error":
            raise UserError(frame[0]["id"], **frame[0]["values"])
        return frame

    def end(self) -> int:
        """Stop it, if it has not ended by itself; its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; only the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def error_frame(error: UserError) -> dict[str, Any]:
    return {"type": "error", "id": error.id, "values": json.loads(json.dumps(error.values, default=str))}


def limit_memory(more_bytes: int) -> None:
    """This process may take `more_bytes` more address space than it has; then it gets a MemoryError."""
    if now := _address_space_bytes():
        apart.limit(memory_bytes=now + more_bytes)


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    now = _address_space_bytes()
    if resource is None or not now:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = min(limit for limit in (now + more_bytes, before, hard) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _address_space_bytes() -> int:
    """Of this process; 0 where the system does not say: the caps on cells, lines and ratios still hold."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
