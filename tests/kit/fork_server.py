"""Traces by a process that has imported torch already: `service` starts a worker for each, and importing costs it more
than tracing. The server forks where a worker would be started; what runs in the fork is the worker's own main().

Tests of the start itself put REAL_START back.
"""

import atexit
import gc
import io
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretrain.predict.trace import service
from foretrain.predict.trace.service import Request

REAL_START = service.start_worker
REPO = Path(__file__).parents[2]


class Server:
    """The process, started when first asked."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def fork(self, job: Path, out: Path) -> int:
        """The process id of a worker with this job."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.fork_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
            atexit.register(self.end)
        asked = {"job": str(job), "out": str(out), "environment": dict(os.environ)}
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


SERVER = Server()


class Forked:
    """What `service` asks of a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, status: Path) -> None:
        self.pid, self.status, self.returncode = pid, status, None

    def poll(self) -> int | None:
        with suppress(OSError, ValueError):
            self.returncode = int(self.status.read_text())
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            select.select([], [], [], 0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def start(jobs: Sequence[tuple[Request, Path]], folder: Path) -> Any:
    """In the place of service.start_worker."""
    return Forked(SERVER.fork(service.write_jobs(jobs, folder), folder / "host"), folder / "host.status")


def serve() -> None:
    """Fork at each line; say of each child how it ended in a file beside its answer."""
    import torch._inductor.compile_fx  # noqa: F401

    from foretrain.predict.trace import drive, session, worker

    assert drive
    assert session
    gc.freeze()  # a child neither walks nor copies what all of them share
    children: dict[int, Path] = {}
    while True:
        asked = select.select([0], [], [], 0.01)[0]
        for pid in list(children):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                ended = children.pop(pid)
                with suppress(OSError):  # its folder may be gone with who asked
                    worker.tell(ended, os.waitstatus_to_exitcode(code))
        if not asked:
            continue
        line = read_line()
        if not line:
            return
        what = json.loads(line)
        out = Path(what["out"])
        if pid := os.fork():
            children[pid] = out
            os.write(1, b"%d\n" % pid)
        else:
            become_worker(what, out, worker)


def read_line() -> bytes:
    parts = [os.read(0, 1 << 20)]
    while parts[-1] and not parts[-1].endswith(b"\n"):
        parts.append(os.read(0, 1 << 20))
    return b"".join(parts)


def become_worker(what: dict[str, Any], out: Path, worker: Any) -> None:
    """As service.start_worker would have started it."""
    code = 1
    try:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(what["job"], os.O_RDONLY), 0)
        os.setsid()
        os.environ.update(what["environment"])
        os.chdir(out.parent)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
        code = worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
