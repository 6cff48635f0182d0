"""Exact answers on request: one process at a time, with its progress, stopped on request or by the next one."""

import secrets
import threading
import time
from typing import Any

from foretrain.base.errors import UserError
from foretrain.predict.trace import service
from foretrain.web import calls, child
from foretrain.web.answers import SCHEMA, Made, answered
from foretrain.web.form import Form, line_of

_KEPT = 4


class Job:
    """The trace of a form."""

    def __init__(self, form: Form) -> None:
        self.id = secrets.token_hex(8)
        self._child = child.Child("exact", form.model_dump(mode="json"))
        self.stop = self._child.stop

    @property
    def state(self) -> str:
        if self._child.stopped:
            return "stopped"
        if not self._child.finished():
            return "working"
        return "failed" if self._child.failure else "done"

    def told(self) -> dict[str, Any]:
        state = self.state
        return {
            "schema": SCHEMA, "state": state, "progress": self._child.progress,
            "reason": self._child.failure if state == "failed" else "",
            "plan": self._child.answer if state == "done" else None,
        }  # fmt: skip


class Jobs:
    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def begin(self, form: Form) -> Made:
        """Begin to trace a form; what was being traced is stopped. Raises UserError for what cannot be planned, and
        where nothing can be traced here."""
        calls.to_trace(form)
        if reason := why_not():
            raise UserError("environment.no_trace", reason=reason)
        self.stop_all()
        job = Job(form)
        self._jobs[job.id] = job
        for id in list(self._jobs)[:-_KEPT]:
            del self._jobs[id]
        return 202, {"schema": SCHEMA, "job": job.id}

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def stop_all(self) -> None:
        for job in self._jobs.values():
            job.stop()


def why_not() -> str:
    """'' where exact answers can be had here, else the sentence that says why not."""
    return service.why_not()


# Advice in a process: a deep model takes many seconds, in which the page would answer nobody else.
#
# A question is answered within WAIT_S: with the advice, else with a job to ask again. The newest question wins.

WAIT_S = 2.0


class Advising:
    """One question for advice, worked on in a process. `body`: as it was posted."""

    def __init__(self, body: bytes) -> None:
        self.id = secrets.token_hex(8)
        self._begun = time.monotonic()
        self._child = child.Child("advice", body.decode("utf-8", "replace"))
        self.stop = self._child.stop

    def state(self) -> Made:
        """The answer, waited for WAIT_S; else 202 and the seconds so far. Raises UserError where there is none."""
        if not self._child.finished(WAIT_S):
            seconds = int(time.monotonic() - self._begun)
            return 202, {"schema": SCHEMA, "job": self.id, "seconds": seconds}
        if self._child.failure:
            raise UserError("page.advice_failed", reason=self._child.failure)
        status, answer = self._child.answer
        return status, answer


class Adviser:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._newest: Advising | None = None

    def answer(self, body: bytes) -> Made:
        """Begin to answer a body; one that is no question is refused at once."""
        return answered(body, Form, lambda form: self._begun(form, body).state())

    def _begun(self, form: Form, body: bytes) -> Advising:
        line_of(form).request()
        with self._turn:
            self.stop()
            self._newest = Advising(body)
            return self._newest

    def get(self, id: str) -> Advising | None:
        newest = self._newest
        return newest if newest is not None and newest.id == id else None

    def stop(self) -> None:
        if self._newest is not None:
            self._newest.stop()
