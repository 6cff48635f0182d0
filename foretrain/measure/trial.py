"""A child process that trains steps of one config, its memory watched; and a short trial of a run's sizes in one:
evaluations around two optimizer steps of at most two micro-steps (Adam's states appear after the first). It is capped
by PyTorch's allocator on CUDA; on a CPU the parent polls fifty times per second."""

import math
import time
from typing import Any, Literal

from foretrain.base import bugs, processes
from foretrain.base.messages import printable, say
from foretrain.base.process_memory import resident_bytes
from foretrain.base.records import Record
from foretrain.config.options import RunConfig

LOOK_EVERY_S = 0.02


class Trial(Record):
    """`peak_bytes`: of the process on a CPU, reserved memory on CUDA. `problem`: why it tells nothing about memory."""

    batch_size: int
    lived: bool
    peak_bytes: int
    problem: str = ""


class Fault(Record):
    reason: Literal["memory", "timeout", "failed"]
    peak_bytes: int = 0
    problem: str = ""


class StepsChild(processes.Child):
    def __init__(self, module: str, config: RunConfig, cap_bytes: int | None, **variables: str) -> None:
        super().__init__(module, env=variables)
        self.config, self.cap_bytes, self.peak_bytes = config, cap_bytes, 0

    def answer(self, limit_s: float = math.inf) -> dict[str, Any] | Fault:
        end, watched = time.monotonic() + limit_s, config_on_cpu(self.config) and self.cap_bytes is not None
        while (found := self.receive(LOOK_EVERY_S)) is None:
            if watched:
                self.peak_bytes = max(self.peak_bytes, resident_bytes(self.pid) or 0)
                if self.peak_bytes > (self.cap_bytes or 0):
                    return Fault(reason="memory", peak_bytes=self.peak_bytes)
            if time.monotonic() > end:
                return Fault(reason="timeout", peak_bytes=self.peak_bytes)
        if isinstance(found, processes.ProcessExit):
            if found.is_killed and config_on_cpu(self.config):  # by the system, for want of memory
                return Fault(reason="memory", peak_bytes=self.peak_bytes)
            return Fault(reason="failed", peak_bytes=self.peak_bytes, problem=problem_of(found))
        self.peak_bytes = max(self.peak_bytes, found.value.get("peak_bytes", 0))
        return Fault(reason="memory", peak_bytes=self.peak_bytes) if "died" in found.value else found.value


def run_trial(config: RunConfig, cap_bytes: int | None) -> Trial:
    child = StepsChild("foretrain.measure.trial", config, cap_bytes)
    try:
        child.send({"config": config.model_dump(mode="json"), "cap_bytes": cap_bytes})
        found = child.answer()
    finally:
        child.end()
    failed = isinstance(found, Fault)
    return Trial(
        batch_size=config.batch_size, lived=not failed or found.reason == "failed", peak_bytes=child.peak_bytes,
        problem=found.problem if failed else "",
    )  # fmt: skip


def config_on_cpu(config: RunConfig) -> bool:
    return config.device == "cpu"


def problem_of(failure: processes.ProcessExit) -> str:
    """Return why a child's trial ended: its last line, exit code, and the file with its output."""
    lines = failure.printed.strip().splitlines()
    last = printable(lines[-1][:200]) if lines else say("trial.silent")
    path = bugs.write_text_file(failure.printed, "trial") if lines else None
    return say("trial.kept" if path else "trial.failed", last=last, code=failure.code, path=path)


def main(parent: processes.Parent) -> None:
    if (job := parent.receive()) is None:
        return
    from foretrain.measure.timed_step import try_steps

    lived, peak = try_steps(RunConfig.model_validate(job.value["config"]), job.value["cap_bytes"])
    parent.send({"peak_bytes": max(peak, 0)} if lived else {"died": "memory", "peak_bytes": max(peak, 0)})
