"""Processes that the page starts for work that would make the server large or slow, and what runs in them.

A job comes in as JSON; lines of progress and {"answer": …} or {"error": a sentence} go out. A process of its own also
ends with all that it started.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from foretrain.base import apart, bugs, messages
from foretrain.base.errors import UserError

# What a process can do: a function of what is asked, in a module that only that process loads.
WORK = {
    "advice": ("foretrain.web.calls", "advice"),
    "comparison": ("foretrain.web.comparison", "of_paths"),
    "exact": ("foretrain.web.exact", "traced"),
    "exact_finetune": ("foretrain.web.exact", "traced_finetune"),
}
_GRACE_S = 3.0


def start(work: str) -> subprocess.Popen[str]:
    """This module of this foretrain, for one of WORK, in a process group of its own."""
    return apart.start(
        "foretrain.web.child", work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, encoding="utf-8",
    )  # fmt: skip


class Child:
    """A process at work. `progress`: what it last said of how far it is; `answer`: what came of it at the end."""

    def __init__(self, work: str, asked: Any) -> None:
        self.progress, self._error, self.stopped = "", "", False
        self.answer: Any = None
        self._done = threading.Event()
        self._process = start(work)
        job = json.dumps({"language": messages.current().id, "asked": asked})
        threading.Thread(target=self._follow, args=(job,), daemon=True).start()

    def _follow(self, job: str) -> None:
        process, last = self._process, {}
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError), process.stdin:  # one that dies at once says nothing either
            process.stdin.write(job)
        with contextlib.suppress(OSError, ValueError), process.stdout:  # a line that was cut is not JSON
            for line in process.stdout:
                last = json.loads(line)
                self.progress = last.get("progress", self.progress)
        code = process.wait()
        self.answer = last.get("answer")
        self._error = "" if "answer" in last else last.get("error") or f"exit {code}"
        self._done.set()

    def finished(self, most_s: float = 0.0) -> bool:
        """Whether it has ended, waited for so long."""
        return self._done.wait(most_s)

    @property
    def failure(self) -> str:
        """Why a finished one has no answer, '' where it has one."""
        return "stopped" if self.stopped else self._error

    def stop(self) -> None:
        """End the process and all that it started; nothing of a finished one changes."""
        if self.finished():
            return
        self.stopped = True
        apart.send(self._process, signal.SIGTERM)
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            apart.send(self._process, apart.KILL)
            self._process.wait()


def done(work: str, job: dict[str, Any]) -> dict[str, Any]:
    """What came of a job, in its language: {"answer": …} or {"error": a sentence}."""
    module, name = WORK[work]
    with messages.speaking(job["language"]):
        try:
            return {"answer": getattr(importlib.import_module(module), name)(job["asked"])}
        except UserError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": str(bugs.unexpected_error(error))}


def say(line: dict[str, Any]) -> None:
    """Tell the server a line, such as {"progress": how far the work is}."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # sliders, and a training that runs here, go first
    say(done(sys.argv[1], json.load(sys.stdin)))
