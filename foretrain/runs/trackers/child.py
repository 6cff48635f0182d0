"""The process that reports one run to one tracker: `python -m foretrain.runs.trackers.child NAME`.

It is handed one JSON object a line: first the job, then lines of metrics, then the end. It answers with one line once
the run is begun, once it is over, and where it cannot go on. Its input ends with the training, also where that was
killed. A stop of the training is none of its business: it is told of it, and reports what is left.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrain.runs.trackers import TRACKERS
from foretrain.runs.trackers.tracker import Job, short

TRIES_S = 1.0, 4.0  # the waits before what has failed is tried again
FLUSH_S = 5.0


def main() -> None:
    """Serve the training on the standard streams."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        with contextlib.suppress(AttributeError, ValueError):  # Windows has not all of them
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)  # the training's threads go first

    def answer(**values: Any) -> None:
        with contextlib.suppress(OSError):  # the training is gone
            answers.write(json.dumps(values) + "\n")
            answers.flush()

    code = 0
    try:
        _report(sys.argv[1], answer)
    except Exception as error:
        traceback.print_exc()
        answer(failed=short(error))
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a library's threads, and what it does at exit, are not waited for


def _report(name: str, answer: Callable[..., None]) -> None:
    job = json.loads(sys.stdin.readline())
    tracker = TRACKERS[name]()
    started = tracker.start(Job(**{**job, "folder": Path(job["folder"])}))
    answer(id=started.id, look=started.look, offline=started.offline, send=started.send)
    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    flushed_s = time.monotonic()
    while "status" not in (line := lines.get()):
        _tried(lambda line=line: tracker.log(line["step"], line["values"], line["at_s"]))
        if lines.empty() or time.monotonic() - flushed_s > FLUSH_S:
            _tried(tracker.flush)
            flushed_s = time.monotonic()
    tracker.finish(line["status"])
    answer(done=True)


def _listen(lines: "queue.Queue[dict[str, Any]]") -> None:
    for text in sys.stdin:
        lines.put(json.loads(text))
    lines.put({"status": "killed"})


def _tried(act: Callable[[], None]) -> None:
    """Do it, and where it fails a few times more. Raises what it raised at last."""
    for wait_s in TRIES_S:
        try:
            return act()
        except Exception:
            traceback.print_exc()
            time.sleep(wait_s)
    return act()


if __name__ == "__main__":
    main()
