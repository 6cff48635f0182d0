"""`Report`: sends a run's lines to a tracker's process (`main`), and never lets the training wait: while a thread's
queue is full, lines are left out and counted. A failure is reported once."""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretrain.base.process_memory import system
from foretrain.base.processes import Child, Parent
from foretrain.runs.trackers import TRACKERS
from foretrain.runs.trackers.tracker import Job, Namer, Tracker, short

MOST_WAITING = 10_000
CHILD = "foretrain.runs.trackers.report"
FINISH_S = 40.0  # how long the end of a run waits; a tracker that sends gives up before
SOON_S, LATER_S, STARTING_S = 0.25, 5.0, 20.0  # how often its process is polled: while it starts, and after that
LAST_S = 10.0
TELL_S = 2.0  # before a message says what is waited for
Event = tuple[str, dict[str, Any]]


@dataclass
class Report:
    """One run to one tracker. `before`: lines by an earlier process; `told`: (event id, values) for the user."""

    tracker: type[Tracker]
    job: Job
    namer: Namer
    before: list[dict[str, Any]] = field(default_factory=list)
    id: str | None = None  # once it has begun
    processor_s: float = 0.0  # of the tracker's process and its children

    def __post_init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._left_out = 0
        self._status = "killed"
        self._over = threading.Event()
        self._began_s, self._looked_s = time.monotonic(), 0.0
        self._child: Child | None = None
        self._failed = not self.tracker.is_installed()
        if self._failed:
            self._say("tracker_not_installed", command=self.tracker.install())
            self._over.set()
            return
        threading.Thread(target=self._work, daemon=True).start()

    def hear(self, line: dict[str, Any]) -> None:
        if self._failed:
            return
        try:
            self._lines.put_nowait({**line, "at_s": time.time()})
        except queue.Full:
            self._left_out += 1

    def begin_end(self, status: str) -> None:
        self._status = status
        threading.Thread(target=self._lines.put, args=(None,), daemon=True).start()

    def ended(self, most_s: float) -> bool:
        return self._over.wait(most_s)

    def give_up(self) -> None:
        if self._child is not None and not self._over.is_set():
            self._say("tracker_slow", waited=FINISH_S, check=self.tracker.check)
            self._failed = True
            self._child.end()
            self._over.wait(LAST_S)

    def _say(self, id: str, /, **values: Any) -> None:
        self.events.put((id, {"tracker": self.tracker.name, **values}))

    @property
    def _log(self) -> Path:
        return self.job.folder / f"tracker-{self.tracker.name}.log"

    def _work(self) -> None:
        try:
            self._child = child = Child(CHILD, self.tracker.name, log=self._log.open("wb"))
        except OSError as error:
            self._fail(error.strerror or str(error))
            self._over.set()
            return
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        child.send({**asdict(self.job), "folder": str(self.job.folder)})
        for line in self._as_they_come():
            child.send(line)
            if time.monotonic() - self._looked_s >= self._look_again_s:
                self._look_at_process()

    def _as_they_come(self) -> Iterator[dict[str, Any]]:
        """Yield the child's frames. In a resumed run an evaluation that a tracker takes back is repeated."""
        first = True
        while (line := self._next()) is not None:
            if first:
                first = False
                self.namer.skip(one for one in self.before if one["step"] < line["step"])
                kept = [one for one in self.before if one["step"] == line["step"] and one["kind"] == "evaluation"]
                if self.tracker.takes_back and line["kind"] == "step":
                    for one in kept:
                        yield self._named({**one, "at_s": line["at_s"] - 0.01})
            yield self._named(line)
        yield {"status": self._status}

    def _next(self) -> dict[str, Any] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=self._look_again_s)
            self._look_at_process()

    def _named(self, line: dict[str, Any]) -> dict[str, Any]:
        return {"step": line["step"], "values": self.namer.named(line), "at_s": line["at_s"]}

    @property
    def _look_again_s(self) -> float:
        """Return how often its process is polled: starting a library is most of its work."""
        return SOON_S if time.monotonic() - self._began_s < STARTING_S else LATER_S

    def _look_at_process(self) -> None:
        self._looked_s = time.monotonic()
        if self._child is None or self._child.process.returncode is not None:
            return
        with contextlib.suppress(Exception):  # it has ended meanwhile
            process = system().Process(self._child.pid)
            times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
            self.processor_s = sum(one.user + one.system for one in times)

    def _listen(self, child: Child) -> None:
        done = False
        for frame in child:
            done = done or "done" in frame.value
            self._take(frame.value)
        code = child.end()
        self.processor_s = 0.0  # the system counts it as this process's own from now on
        if not done and not self._failed:
            self._fail(f"its process ended with exit code {code}")
        if self._left_out:
            self._say("tracker_behind", count=self._left_out)
        if not self._failed:  # a library's messages without a failure are ignored
            with contextlib.suppress(OSError):
                self._log.unlink()
        self._over.set()

    def _take(self, answer: dict[str, Any]) -> None:
        if "failed" in answer:
            self._fail(answer["failed"])
        elif "id" in answer:
            self.id = answer["id"]
            if answer["offline"]:
                self._say("tracker_offline", reason=answer["offline"], check=self.tracker.check, command=answer["send"])
            else:
                self._say("tracker_started", look=answer["look"])

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._say("tracker_failed", reason=reason, check=self.tracker.check)


TRIES_S = 1.0, 4.0  # the waits before retries
FLUSH_S = 5.0


def main(parent: Parent, name: str) -> None:
    for number in ("SIGTERM", "SIGHUP"):
        with contextlib.suppress(AttributeError, ValueError):  # Windows lacks some of them
            signal.signal(getattr(signal, number), signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)  # the training's threads go first
    parent.gone = lambda: None
    try:
        _report(name, parent)
    except Exception as error:
        traceback.print_exc()
        parent.send({"failed": short(error)})
        sys.exit(1)


def _report(name: str, parent: Parent) -> None:
    asked = parent.receive()
    if asked is None:
        return
    tracker = TRACKERS[name]()
    started = tracker.start(Job(**{**asked.value, "folder": Path(asked.value["folder"])}))
    parent.send({"id": started.id, "look": started.look, "offline": started.offline, "send": started.send})
    flushed_s = time.monotonic()
    while (frame := parent.receive()) is not None and "status" not in (line := frame.value):
        _tried(lambda line=line: tracker.log(line["step"], line["values"], line["at_s"]))
        if not parent.has_frames or time.monotonic() - flushed_s > FLUSH_S:
            _tried(tracker.flush)
            flushed_s = time.monotonic()
    tracker.finish(frame.value["status"] if frame else "killed")
    parent.send({"done": True})


def _tried(act: Callable[[], None]) -> None:
    """Try it, with a few retries. Raises its last error."""
    for wait_s in TRIES_S:
        try:
            return act()
        except Exception:
            traceback.print_exc()
            time.sleep(wait_s)
    return act()
