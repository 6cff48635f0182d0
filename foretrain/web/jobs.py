"""Traces and advice in processes: a deep model takes seconds, in which the page would answer nobody else.

A question is answered within WAIT_S: with the answer, else with a job to ask again. The newest of each kind of work
stops the one before.
"""

import secrets
import threading
import time

from foretrain.base.errors import UserError
from foretrain.predict.trace import service
from foretrain.web import calls, child
from foretrain.web.answers import SCHEMA, Made
from foretrain.web.form import Form, line_of

WAIT_S = 1.0
_KEPT = 4


class Job:
    """One form that a process works on. `work`: what of child.WORK."""

    def __init__(self, work: str, form: Form) -> None:
        self.id, self.work, self._begun = secrets.token_hex(8), work, time.monotonic()
        self._child = child.Child(work, form.model_dump(mode="json"))
        self.stop = self._child.stop

    def told(self, wait_s: float) -> Made:
        """Return the answer, waited for so long; else 202 and how far it is. Raises UserError where there is none."""
        if not self._child.finished(wait_s):
            seconds, progress = int(time.monotonic() - self._begun), self._child.progress
            return 202, {"schema": SCHEMA, "job": self.id, "seconds": seconds, "progress": progress}
        if self._child.failure:
            raise UserError("page.failed", reason=self._child.failure)
        status, answer = self._child.answer
        return status, answer


class Jobs:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def advise(self, form: Form) -> Made:
        """Begin to look for changes. Raises UserError for what cannot be asked."""
        line_of(form).request()
        return self._begun("advice", form).told(WAIT_S)

    def trace(self, form: Form) -> Made:
        """Begin to trace a form. Raises UserError for what cannot be planned, and where nothing can be traced here."""
        calls.to_trace(form)
        if reason := why_not():
            raise UserError("environment.no_trace", reason=reason)
        return self._begun("exact", form).told(0.0)

    def _begun(self, work: str, form: Form) -> Job:
        with self._turn:
            self.stop(work)
            job = Job(work, form)
            self._jobs = dict([*list(self._jobs.items())[1 - _KEPT :], (job.id, job)])
            return job

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def stop(self, work: str = "") -> None:
        """Stop all of this kind of work; of every kind where none is named."""
        for job in self._jobs.values():
            if work in ("", job.work):
                job.stop()


def why_not() -> str:
    """'' where exact answers can be had here, else the sentence that says why not."""
    return service.why_not()
