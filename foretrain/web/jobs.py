"""Exact answers on request: one process at a time, with its progress, stopped on request or by the next one."""

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from foretrain.base.errors import UserError
from foretrain.predict.plan import Plan
from foretrain.predict.trace import service
from foretrain.web import advices, answers, child, planner
from foretrain.web.answers import Made, answered
from foretrain.web.finetune import asked as finetune

_KEPT = 4
Show = Callable[[Any], dict[str, Any]]


class Job:
    """One trace: `work` of child.WORK with what is asked; `show`: what came of it as the page takes a plan."""

    def __init__(self, work: str, asked: Any, show: Show) -> None:
        self.id = secrets.token_hex(8)
        self._child, self._show = child.Child(work, asked), show
        self.stop = self._child.stop

    @property
    def progress(self) -> str:
        return self._child.progress

    @property
    def state(self) -> str:
        if self._child.stopped:
            return "stopped"
        if not self._child.finished():
            return "working"
        return "failed" if self._child.failure else "done"

    @property
    def reason(self) -> str:
        return self._child.failure if self.state == "failed" else ""

    def begun(self) -> dict[str, Any]:
        return {"schema": answers.SCHEMA, "job": self.id}

    def told(self) -> dict[str, Any]:
        done = self._show(self._child.answer) if self.state == "done" else None
        return {
            "schema": answers.SCHEMA, "state": self.state, "progress": self.progress, "reason": self.reason,
            "plan": done,
        }  # fmt: skip


class Jobs:
    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        # What answers a form that is posted to a path: the job that begins.
        self.posted: dict[str, Callable[[bytes], Made]] = {
            "/api/exact": lambda body: answered(body, planner.Asked, self._pretraining),
            "/api/finetune/exact": lambda body: answered(body, finetune.Asked, self._finetuning),
        }

    def _pretraining(self, asked: planner.Asked) -> Made:
        planner.check_alone(asked, "page.count_exact")
        found = planner.resolved(asked)
        plan = planner.made(found, asked.gpu, asked.others)

        def show(answer: dict[str, Any]) -> dict[str, Any]:
            return answers.plan_json(Plan.model_validate(answer).model_copy(update={"gpu": plan.gpu}), found)

        return 202, self.start("exact", plan.to_json(), show).begun()

    def _finetuning(self, asked: finetune.Asked) -> Made:
        finetune.made(finetune.question(asked), finetune.target(asked))  # what cannot be planned is not traced
        return 202, self.start("exact_finetune", asked.model_dump(mode="json")).begun()

    def start(self, work: str, asked: Any, show: Show = dict) -> Job:
        """Begin a trace; what was being traced is stopped. Raises UserError where nothing can be traced here."""
        if reason := why_not():
            raise UserError("environment.no_trace", reason=reason)
        self.stop_all()
        job = Job(work, asked, show)
        self._jobs[job.id] = job
        for id in list(self._jobs)[:-_KEPT]:
            del self._jobs[id]
        return job

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
            return 202, {"schema": answers.SCHEMA, "job": self.id, "seconds": seconds}
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
        return answered(body, advices.AskedAdvice, lambda _: self._begun(body).state())

    def _begun(self, body: bytes) -> Advising:
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
