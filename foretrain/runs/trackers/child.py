"""The process that reports one run to one tracker.

It is handed the job first, then lines of metrics, then the end. It answers once the run is begun, once it is over, and
where it cannot go on. Frames end with the training, also where that was killed. A stop of the training is none of its
business: it is told of it, and reports what is left.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from foretrain.base.processes import Parent
from foretrain.runs.trackers import TRACKERS
from foretrain.runs.trackers.tracker import Job, short

TRIES_S = 1.0, 4.0  # the waits before what has failed is tried again
FLUSH_S = 5.0


def main(parent: Parent, name: str) -> None:
    """Serve the training."""
    for number in ("SIGTERM", "SIGHUP"):
        with contextlib.suppress(AttributeError, ValueError):  # Windows has not all of them
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
    """Do it, and where it fails a few times more. Raises what it raised at last."""
    for wait_s in TRIES_S:
        try:
            return act()
        except Exception:
            traceback.print_exc()
            time.sleep(wait_s)
    return act()
