"""The child processes of `foretrain tune`; where memory lacks for the next, the least recently used are ended."""

import os
import shutil
import sys
import tempfile
import time
import traceback
from types import TracebackType
from typing import Any, Self

from foretrain.base.errors import ExitCode
from foretrain.base.processes import Parent, end_group, need_fork
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.hardware.cpu import cores_each
from foretrain.measure.trial import Fault, StepsChild

IS_OTHER = "FORETRAIN_TUNE_RANK" in os.environ


def main(parent: Parent) -> None:
    """Time one setting's training steps in a child, in short bursts whenever the parent asks: it gets the job, then
    orders, each answered by one frame. A step of random tokens is cut short where it has many micro-batches."""
    first = parent.receive()
    if first is None:
        return
    job: dict[str, Any] = first.value

    def gone() -> None:
        shutil.rmtree(job["scratch"], ignore_errors=True)  # nobody is left to do it
        end_group()

    def next_order() -> Any:
        order = parent.receive()
        return order.value if order else None

    def answer(value: dict[str, Any]) -> None:
        if IS_OTHER and "died" in value:
            os._exit(int(ExitCode.OUT_OF_MEMORY))  # which the first rank reports
        parent.send(value)

    parent.gone = gone
    try:
        from foretrain.measure.timed_step import serve

        serve(job, next_order, answer)
    except BaseException:
        traceback.print_exc()
        if job["world"] > 1:
            time.sleep(1.0)  # another rank may have ended, which the thread that watches them reports
        sys.exit(1)


SIDE_BY_SIDE = 0.6  # of available memory; beyond it, children are ended to make room


class Burst(Record):
    """Some steps. `step_s`: their lower quartile; `started_s`: the child's start; `elsewhere`: others' share."""

    step_s: float
    steps: int
    peak_bytes: int
    started_s: float = 0.0
    elsewhere: float = 0.0
    loss: float | None = None


class Pool:
    """Times settings, each in a child. `cap_bytes`: for a process; `room_bytes`: for all; `world`: per step."""

    def __init__(
        self, cap_bytes: int | None, room_bytes: int | None, *, cpu_clock: bool = False, world: int = 1
    ) -> None:
        self.cap_bytes, self.room_bytes, self.cpu_clock, self.world = cap_bytes, room_bytes, cpu_clock, world
        self._children: dict[str, StepsChild] = {}  # the least recently used first
        self._seen: dict[str, int] = {}  # a setting's earlier memory
        self.started = 0

    def __enter__(self) -> Self:
        need_fork("foretrain tune")  # its children are ended as a group
        self.scratch = tempfile.mkdtemp(prefix="foretrain-tune-")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for key in list(self._children):
                self._end(key)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def holds(self, config: RunConfig) -> bool:
        return config.model_dump_json() in self._children

    def burst(self, config: RunConfig, seconds: float, limit_s: float, expected_bytes: int | None) -> Burst | Fault:
        key, began, seen = config.model_dump_json(), time.monotonic(), {}
        new = key not in self._children
        if new:
            self._make_room(max(self._seen.get(key, 0), expected_bytes or 0))
            found = self._start(key, config, limit_s)
            if isinstance(found, Fault):
                return found
            seen = found
        ready_s = time.monotonic() - began if new else 0.0
        found = self._ask(key, {"burst": seconds}, max(1.0, limit_s - ready_s))
        if isinstance(found, Fault):
            return found
        times = sorted(found["times"])
        return Burst(
            step_s=times[len(times) // 4], steps=len(times), peak_bytes=found["peak_bytes"], started_s=ready_s,
            elsewhere=found["elsewhere"], loss=seen.get("loss"),
        )  # fmt: skip

    def evaluate(self, config: RunConfig, limit_s: float, expected_bytes: int | None) -> int | Fault:
        """Evaluate beside the training state; return the peak in bytes, or why there is none."""
        key = config.model_dump_json()
        if key not in self._children:
            self._make_room(max(self._seen.get(key, 0), expected_bytes or 0))
            found = self._start(key, config, limit_s)
            if isinstance(found, Fault):
                return found
        found = self._ask(key, {"evaluate": True}, limit_s)
        return found if isinstance(found, Fault) else int(found["peak_bytes"])

    def drop(self, config: RunConfig) -> None:
        self._end(config.model_dump_json())

    def _start(self, key: str, config: RunConfig, limit_s: float) -> dict[str, Any] | Fault:
        job = {
            "config": config.model_dump(mode="json"), "cap_bytes": self.cap_bytes, "cpu_clock": self.cpu_clock,
            "scratch": self.scratch, "world": self.world,
        }  # fmt: skip
        self.started += 1
        environ = {"TMPDIR": self.scratch}
        if self.world > 1 and "OMP_NUM_THREADS" not in os.environ:
            environ["OMP_NUM_THREADS"] = str(cores_each(self.world))
        self._children[key] = child = StepsChild("foretrain.measure.pool", config, self.cap_bytes, **environ)
        child.send(job)
        return self._listen(key, limit_s)

    def _ask(self, key: str, order: dict[str, Any], limit_s: float) -> dict[str, Any] | Fault:
        child = self._children.pop(key)
        self._children[key] = child  # most recently used
        child.send(order)
        return self._listen(key, limit_s)

    def _listen(self, key: str, limit_s: float) -> dict[str, Any] | Fault:
        child = self._children[key]
        found = child.answer(limit_s)
        self._seen[key] = child.peak_bytes
        if isinstance(found, Fault):
            self._end(key)
        return found

    def _make_room(self, needed_bytes: int) -> None:
        while self._children and self.room_bytes is not None:
            held = sum(child.peak_bytes for child in self._children.values())
            if held + needed_bytes <= SIDE_BY_SIDE * self.room_bytes:
                return
            self._end(next(iter(self._children)))

    def _end(self, key: str) -> None:
        child = self._children.pop(key, None)
        if child is not None:
            child.end()
