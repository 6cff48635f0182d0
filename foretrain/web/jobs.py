"""Exact answers on request: one child process at a time, with its progress, stopped on request or by the next one."""

import contextlib
import json
import secrets
import signal
import subprocess
import threading
from typing import Any

from foretrain.base import apart
from foretrain.base.errors import UserError
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.plan import Plan
from foretrain.predict.trace import service
from foretrain.web import child

_KEPT = 4
_GRACE_S = 3.0


class Job:
    """One trace of a plan. `state` is working, done, failed or stopped."""

    def __init__(self, plan: Plan, found: ResolvedConfig) -> None:
        self.id = secrets.token_hex(8)
        self.found = found
        self.state, self.progress, self.reason = "working", "", ""
        self.plan: Plan | None = None
        self._process = child.start("foretrain.web.exact_child")
        self._gpu = plan.gpu
        self._thread = threading.Thread(target=self._follow, args=({"plan": plan.to_json()},), daemon=True)
        self._thread.start()

    def _follow(self, job: dict[str, Any]) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError), stdin:  # one that dies at once says nothing either
            json.dump(job, stdin)
        last: dict[str, Any] = {}
        with stdout:
            for line in stdout:
                last = json.loads(line)
                self.progress = last.get("progress", self.progress)
        code = self._process.wait()
        if self.state == "stopped":
            return
        if "plan" in last:
            self.plan = Plan.model_validate(last["plan"]).model_copy(update={"gpu": self._gpu})
            self.state = "done"
        else:
            self.state, self.reason = "failed", last.get("error") or f"exit {code}"

    def stop(self) -> None:
        """End the child and its workers; nothing of a finished one changes."""
        if self.state != "working":
            return
        self.state = "stopped"
        apart.send(self._process, signal.SIGTERM)
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            apart.send(self._process, apart.KILL)
            self._process.wait()


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
