"""The child processes of a preparation, and the memory that they may take."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from foretrain.base import bugs, processes
from foretrain.base.errors import UserError
from foretrain.base.processes import Child, Frame, Parent, ProcessExit

try:
    import resource
except ImportError:  # Windows
    resource = None


def start(
    module: str, *words: str, stdin: int | None = subprocess.PIPE, one_thread: bool = True, most_waiting: int = 0
) -> Child:
    # Arrow and glibc reserve address space by thread and pool, which `limit_memory` counts.
    quiet = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    if one_thread:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        quiet |= {"TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(names, "1")}
    return Child(
        f"foretrain.data.prepare.{module}", *words, env=quiet, prints=True, stdin=stdin, leads_group=False,
        most_waiting=most_waiting,
    )  # fmt: skip


def raised(found: Frame | ProcessExit | None) -> Frame | ProcessExit | None:
    if isinstance(found, Frame) and found.value["type"] == "error":
        raise UserError(found.value["id"], **found.value["values"])
    return found


def telling(parent: Parent, work: Callable[[], None], no_memory: UserError) -> None:
    """Do a child's work. An error that a user can fix is sent; a bug prints its sentence."""

    def tell(error: UserError) -> None:
        parent.send({"type": "error", "id": error.id, "values": json.loads(json.dumps(error.values, default=str))})

    def report() -> None:
        try:
            work()
        except UserError as error:
            tell(error)
        except MemoryError:
            tell(no_memory)

    bugs.in_child(report)


def limit_memory(more_bytes: int) -> None:
    """Let this process take `more_bytes` more address space than it has; then it gets a MemoryError."""
    if now := _address_space_bytes():
        processes.limit(memory_bytes=now + more_bytes)


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
    """Return this process's; 0 where the system does not say: the caps on cells, lines and ratios still hold."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
