"""Python in a process of its own: modules of this very foretrain, ended with all that they started."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

SOURCE = str(Path(__file__).parents[2])
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def need_fork(what: str) -> None:
    """Raises UserError 'environment.no_fork' on Windows, where processes cannot be forked nor grouped."""
    if not hasattr(os, "fork"):
        raise UserError("environment.no_fork", what=what)


def search_path() -> str:
    """PYTHONPATH for a process that shall find this foretrain."""
    return os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))


def command(module: str, *words: str) -> list[str]:
    """Runs a module of this foretrain. -P: what lies in the working directory is not imported, whatever its name."""
    return [sys.executable, "-P", "-m", module, *words]


def variables() -> dict[str, str]:
    """This process's variables, with which such a process finds this foretrain."""
    return {**os.environ, "PYTHONPATH": search_path()}


def heeding(reader: int) -> dict[str, Any]:
    """How a child is started that ends when the other side of this pipe closes, and that a Ctrl-C reaches through us
    alone. Windows hands no pipes on, so a child there outlives a parent that is killed."""
    return {"pass_fds": (reader,), "start_new_session": True} if os.name == "posix" else {}


def start(module: str, *words: str, env: dict[str, str] | None = None, **streams: Any) -> subprocess.Popen[Any]:
    """A module that runs in a process group of its own. `env`: its variables, this process's where not given."""
    own = {**(os.environ if env is None else env), "PYTHONPATH": search_path()}
    return subprocess.Popen(command(module, *words), env=own, start_new_session=True, **streams)


def finished(module: str, *words: str, most_s: float) -> subprocess.CompletedProcess[bytes]:
    """What a module prints, which reads a file of others'. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        command(module, *words), stdin=subprocess.DEVNULL, capture_output=True, timeout=most_s, check=False,
        env=variables(),
    )  # fmt: skip


def send(process: subprocess.Popen[Any], number: int) -> None:
    """A signal to a process and all that it started; where there are no groups, the process is ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.terminate()


def end(process: subprocess.Popen[Any]) -> int:
    """Kill a process with all that it started, compilers for one, and wait until it is gone; its exit code."""
    send(process, KILL)
    code = process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return code


def limit(*, memory_bytes: int | None = None, file_bytes: int | None = None, processor_s: int | None = None) -> None:
    """From now on this process may take so much address space and time, and write files so large."""
    if resource is None:
        return
    most = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CPU: processor_s}
    for kind, value in most.items():
        if value is not None:
            _, hard = resource.getrlimit(kind)
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (least, least))
