"""Processes for work that would make the server large or slow: a job comes in; frames of progress and {"answer":
(status, JSON)} or {"error": a bug's sentence} go out."""

import importlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from foretrain.base import bugs, messages, processes
from foretrain.base.errors import UserError
from foretrain.web.answers import error_json

# What a process can do: a function of what is asked, in a module that only that process loads.
WORK = {
    "advice": ("foretrain.web.calls", "advise"),
    "comparison": ("foretrain.web.routes", "of_paths"),
    "exact": ("foretrain.web.calls", "traced"),
}
_TELLING = ("exact",)  # how far they are
_GRACE_S = 3.0


def start(work: str) -> processes.Child:
    return processes.Child("foretrain.web.child", work)


class Child:
    """A process at work. `progress`: what it last said of how far it is; `answer`: what came of it at the end."""

    def __init__(self, work: str, asked: Any) -> None:
        self.progress, self._error, self.stopped = "", "", False
        self.answer: Any = None
        self._done = threading.Event()
        self._child = start(work)
        self._child.send({"language": messages.current().id, "asked": asked})
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        last: dict[str, Any] = {}
        for frame in self._child:
            last = frame.value
            self.progress = last.get("progress", self.progress)
        code = self._child.end()
        self.answer = last.get("answer")
        self._error = "" if "answer" in last else last.get("error") or f"exit {code}"
        self._done.set()

    def finished(self, most_s: float = 0.0) -> bool:
        return self._done.wait(most_s)

    @property
    def failure(self) -> str:
        return "stopped" if self.stopped else self._error

    def stop(self) -> None:
        if not self.finished():
            self.stopped = True
            self._child.end(_GRACE_S)


def done(work: str, job: dict[str, Any], listen: Callable[[str], None]) -> dict[str, Any]:
    """What came of a job, in its language: {"answer": …} or {"error": a sentence}."""
    module, name = WORK[work]
    more = (listen,) if work in _TELLING else ()
    with messages.speaking(job["language"]):
        try:
            return {"answer": (200, getattr(importlib.import_module(module), name)(job["asked"], *more))}
        except UserError as error:
            return {"answer": (422, error_json(error))}
        except Exception as error:
            return {"error": str(bugs.unexpected_error(error))}


def main(parent: processes.Parent, work: str) -> None:
    if hasattr(os, "nice"):
        os.nice(10)  # sliders, and a training that runs here, go first
    parent.gone = lambda: os.kill(os.getpid(), signal.SIGTERM)  # a trace then ends its own processes
    if (job := parent.receive()) is not None:
        parent.send(done(work, job.value, lambda text: parent.send({"progress": text})))
