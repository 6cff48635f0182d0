"""The child processes of `foretrain tune`: kept alive while memory allows, ended cleanly, never one too many.

A child holds its model between bursts, so that settings can be timed in turns without building them again. Where the
next one would not fit beside those that are alive, the ones asked longest ago are ended first. Each child leads a
process group of its own (its compiler starts others), which is killed as a whole. On a CPU the parent looks at the
memory of the child that works, fifty times a second, and ends it beyond the cap; on a card PyTorch's allocator is
capped in the child. The children's temporary files are in a folder that goes with the pool.
"""

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from types import TracebackType
from typing import Any, Literal, Self

from foretrain.base import apart
from foretrain.base.errors import ExitCode
from foretrain.base.process_memory import resident_bytes
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.hardware.cpu import cores_each
from foretrain.measure.trial import config_on_cpu, failure

# A child process of `foretrain tune`: one setting's training steps, timed in short bursts whenever the parent asks.
#
# The parent writes one JSON object a line: first the job, then orders. Each is answered by one line. What is timed is
# foretrain's own step (model/step.py) on random tokens, which are the same for every setting. A step of many micro-
# batches is cut short: the rest of them take as long as those between the first and the last. The child ends with its
# parent, whose end it notices by its standard input, and takes its compiler's processes and the scratch folder with
# it. Where several ranks share a step, this is the first one (tuning/timed_step.py), or one that the first one started.

IS_OTHER = "FORETRAIN_TUNE_RANK" in os.environ


def main() -> None:
    """Serve the parent on the standard streams."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    job = json.loads(sys.stdin.readline())
    orders: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        shutil.rmtree(job["scratch"], ignore_errors=True)  # nobody is left to do it
        os.killpg(0, signal.SIGKILL)

    def answer(value: dict[str, Any]) -> None:
        if IS_OTHER and "died" in value:
            os._exit(int(ExitCode.OUT_OF_MEMORY))  # which the first rank tells
        reply.write(json.dumps(value) + "\n")
        reply.flush()

    threading.Thread(target=listen, daemon=True).start()
    try:
        from foretrain.measure.timed_step import serve

        serve(job, orders, answer)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if job["world"] > 1:
            time.sleep(1.0)  # another rank may have ended, which the thread that watches them tells
        os._exit(1)
    os._exit(0)  # the thread above still reads


if __name__ == "__main__":
    main()


LOOK_EVERY_S = 0.02
SIDE_BY_SIDE = 0.6  # of the memory that there is; beyond it, children are ended to make room


class Burst(Record):
    """Some steps of one setting. `step_s`: what a quarter of them stayed below. `started_s`: what it took to get the
    child ready, compilation included; 0 where it was. `elsewhere`: share of the machine that other programs used."""

    step_s: float
    steps: int
    peak_bytes: int
    started_s: float = 0.0
    elsewhere: float = 0.0
    loss: float | None = None


class Death(Record):
    """Why a setting cannot be timed."""

    reason: Literal["memory", "timeout", "failed"]
    peak_bytes: int = 0
    problem: str = ""


class _Child:
    """One process, its streams, and what it is doing."""

    def __init__(self, config: RunConfig, job: dict[str, Any], scratch: str) -> None:
        self.config, self.peak_bytes = config, 0
        self.errors = tempfile.TemporaryFile("w+", dir=scratch)  # noqa: SIM115 - closed in `end`
        environ = {**os.environ, "TMPDIR": scratch}
        if job["world"] > 1:
            environ.setdefault("OMP_NUM_THREADS", str(cores_each(job["world"])))
        self.process = apart.start(
            "foretrain.measure.pool", env=environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip
        self._unread = b""
        self.tell(job)

    def tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; reading will show
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, cap_bytes: int | None, limit_s: float) -> dict[str, Any] | Death:
        assert self.process.stdout is not None
        end, watched = time.monotonic() + limit_s, config_on_cpu(self.config) and cap_bytes is not None
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self.process.stdout], [], [], LOOK_EVERY_S)
            if watched:
                self.peak_bytes = max(self.peak_bytes, resident_bytes(self.process.pid) or 0)
                if self.peak_bytes > (cap_bytes or 0):
                    return Death(reason="memory", peak_bytes=self.peak_bytes)
            if readable:
                read = os.read(self.process.stdout.fileno(), 65536)
                if not read:
                    return self._ended()
                self._unread += read
            elif time.monotonic() > end:
                return Death(reason="timeout", peak_bytes=self.peak_bytes)
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        self.peak_bytes = max(self.peak_bytes, found.get("peak_bytes", 0))
        return Death(reason="memory", peak_bytes=self.peak_bytes) if "died" in found else found

    def _ended(self) -> Death:
        code = self.process.wait()
        if code == -signal.SIGKILL and config_on_cpu(self.config):  # the system's own killer is a lack of memory
            return Death(reason="memory", peak_bytes=self.peak_bytes)
        self.errors.seek(0)
        problem = failure(self.errors.read()[-20_000:], code)
        return Death(reason="failed", peak_bytes=self.peak_bytes, problem=problem)

    def end(self) -> None:
        """Kill it with all that it started, and wait until it is gone."""
        apart.end(self.process)
        with contextlib.suppress(OSError):
            self.errors.close()


class Pool:
    """Times settings, each in its child. `cap_bytes`: what a process may take; `room_bytes`: what all together may.
    `world`: how many processes share each step.

    Leaving the `with` ends every child and removes their files, whatever happened.
    """

    def __init__(
        self, cap_bytes: int | None, room_bytes: int | None, *, cpu_clock: bool = False, world: int = 1
    ) -> None:
        self.cap_bytes, self.room_bytes, self.cpu_clock, self.world = cap_bytes, room_bytes, cpu_clock, world
        self._children: dict[str, _Child] = {}  # the one asked longest ago first
        self._seen: dict[str, int] = {}  # what a setting took before
        self.started = 0

    def __enter__(self) -> Self:
        apart.need_fork("foretrain tune")  # its children are waited for by `select`, and ended as a group
        self.scratch = tempfile.mkdtemp(prefix="foretrain-tune-")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for key in list(self._children):
                self._end(key)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def holds(self, config: RunConfig) -> bool:
        """Whether its child is alive, so that a burst costs nothing but itself."""
        return config.model_dump_json() in self._children

    def burst(self, config: RunConfig, seconds: float, limit_s: float, expected_bytes: int | None) -> Burst | Death:
        """Time a setting for about so long. `expected_bytes`: what it is forecast to take."""
        key, began, seen = config.model_dump_json(), time.monotonic(), {}
        new = key not in self._children
        if new:
            self._make_room(max(self._seen.get(key, 0), expected_bytes or 0))
            found = self._start(key, config, limit_s)
            if isinstance(found, Death):
                return found
            seen = found
        ready_s = time.monotonic() - began if new else 0.0
        found = self._ask(key, {"burst": seconds}, max(1.0, limit_s - ready_s))
        if isinstance(found, Death):
            return found
        times = sorted(found["times"])
        return Burst(
            step_s=times[len(times) // 4], steps=len(times), peak_bytes=found["peak_bytes"], started_s=ready_s,
            elsewhere=found["elsewhere"], loss=seen.get("loss"),
        )  # fmt: skip

    def evaluate(self, config: RunConfig, limit_s: float, expected_bytes: int | None) -> int | Death:
        """An evaluation beside the training state: the peak of it all in bytes, or why not."""
        key = config.model_dump_json()
        if key not in self._children:
            self._make_room(max(self._seen.get(key, 0), expected_bytes or 0))
            found = self._start(key, config, limit_s)
            if isinstance(found, Death):
                return found
        found = self._ask(key, {"evaluate": True}, limit_s)
        return found if isinstance(found, Death) else int(found["peak_bytes"])

    def drop(self, config: RunConfig) -> None:
        """End a setting's child, if there is one: it is not needed any more."""
        self._end(config.model_dump_json())

    def _start(self, key: str, config: RunConfig, limit_s: float) -> dict[str, Any] | Death:
        job = {
            "config": config.model_dump(mode="json"), "cap_bytes": self.cap_bytes, "cpu_clock": self.cpu_clock,
            "scratch": self.scratch, "world": self.world,
        }  # fmt: skip
        self.started += 1
        self._children[key] = _Child(config, job, self.scratch)
        return self._listen(key, limit_s)

    def _ask(self, key: str, order: dict[str, Any], limit_s: float) -> dict[str, Any] | Death:
        child = self._children.pop(key)
        self._children[key] = child  # asked last now
        child.tell(order)
        return self._listen(key, limit_s)

    def _listen(self, key: str, limit_s: float) -> dict[str, Any] | Death:
        child = self._children[key]
        found = child.answer(self.cap_bytes, limit_s)
        self._seen[key] = child.peak_bytes
        if isinstance(found, Death):
            self._end(key)
        return found

    def _make_room(self, needed_bytes: int) -> None:
        """End children until one more of this size fits beside the others."""
        while self._children and self.room_bytes is not None:
            held = sum(child.peak_bytes for child in self._children.values())
            if held + needed_bytes <= SIDE_BY_SIDE * self.room_bytes:
                return
            self._end(next(iter(self._children)))

    def _end(self, key: str) -> None:
        child = self._children.pop(key, None)
        if child is not None:
            child.end()
