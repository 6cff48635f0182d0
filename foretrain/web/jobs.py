"""Exact answers on request: one process at a time, with its progress, stopped on request or by the next one."""

import secrets
from functools import cached_property
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.plan import Plan
from foretrain.predict.trace import service
from foretrain.web import answers, child

_KEPT = 4


class Job:
    """One trace of a plan."""

    def __init__(self, plan: Plan, found: ResolvedConfig) -> None:
        self.id = secrets.token_hex(8)
        self.found = found
        self._gpu = plan.gpu
        self._child = child.Child("exact", plan.to_json())
        self.stop = self._child.stop

    @property
    def progress(self) -> str:
        """How far the trace is, in a few words."""
        return self._child.progress

    @property
    def state(self) -> str:
        """working, done, failed or stopped."""
        if self._child.stopped:
            return "stopped"
        if not self._child.finished():
            return "working"
        return "failed" if self._child.failure else "done"

    @property
    def reason(self) -> str:
        """Why it failed, '' where it did not."""
        return self._child.failure if self.state == "failed" else ""

    @cached_property
    def plan(self) -> Plan:
        """The deeper plan of a trace that is done."""
        return Plan.model_validate(self._child.answer).model_copy(update={"gpu": self._gpu})

    def begun(self) -> dict[str, Any]:
        """What is answered when it begins: by what one asks again."""
        return {"schema": answers.SCHEMA, "job": self.id}

    def told(self) -> dict[str, Any]:
        """How far it is, and its plan at the end."""
        done = answers.plan_json(self.plan, self.found) if self.state == "done" else None
        return {
            "schema": answers.SCHEMA, "state": self.state, "progress": self.progress, "reason": self.reason,
            "plan": done,
        }  # fmt: skip


class Jobs:
    """The newest jobs by id."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def start(self, plan: Plan, found: ResolvedConfig) -> Job:
        """Trace this plan; what was being traced is stopped. Raises UserError where nothing can be traced here."""
        if reason := why_not():
            raise UserError("environment.no_trace", reason=reason)
        self.stop_all()
        job = Job(plan, found)
        self._jobs[job.id] = job
        for id in list(self._jobs)[:-_KEPT]:
            del self._jobs[id]
        return job

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def stop_all(self) -> None:
        """Stop what still works."""
        for job in self._jobs.values():
            job.stop()


def why_not() -> str:
    """'' where exact answers can be had here, else the sentence that says why not."""
    return service.why_not()
