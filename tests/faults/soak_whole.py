"""The steps of a soak once more without a fault, to compare every bit: most of them while the soak still runs.

One process makes them, and is held (SIGSTOP) where it comes near to a step that the soak may still do again. Memory
that runs out halves the soak's micro-batch for good, so this run begins a new part there. When the soak is over it is
stopped once, by SIGTERM, and resumed to end at the soak's last checkpoint.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrain.training import checkpoint
from tests.faults.soak_count import segments
from tests.faults.soak_watch import SAVE_EVERY, Watch

Command = Callable[..., list[str]]


class Whole:
    """`command` makes the run's command line; `work`: the soak's folder; `environment`: of its processes."""

    def __init__(self, work: Path, command: Command, environment: dict[str, str]) -> None:
        self.work, self.command, self.environment = work, command, environment
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._parts: list[tuple[int, int]] = []
        self._seen: list[list[int]] = []  # (step, micro-batch) from which each process went on
        shutil.rmtree(work / "whole", ignore_errors=True)

    def begin(self) -> None:
        """Follow the soak that has just begun."""
        self._thread.start()

    def compare(self) -> dict[str, Any]:
        """When the soak is over: do what is left, and say whether every bit is the same."""
        before = time.monotonic()
        self.over.set()
        if self._thread.ident is not None:
            self._thread.join()
        out, whole = self.work / "out", self.work / "whole"
        last = checkpoint.steps_in(out / "checkpoints")[-1]
        parts = [part for part in segments(out) if part[0] < last]
        strayed = self._parts and parts[: len(self._parts)] != self._parts
        if strayed or self._step() > last:  # it followed what did not stay: once more
            shutil.rmtree(whole, ignore_errors=True)
            self._seen.clear()
        for i, (start, batch) in enumerate(parts):
            end = parts[i + 1][0] if i + 1 < len(parts) else last
            if self._step() < end:
                print(f"without faults: steps {start} to {end}, micro-batch {batch}", file=sys.stderr, flush=True)
                self._run(batch, end).wait()
        digests, losses = [], []
        for name in ("out", "whole"):
            path = checkpoint.path_of(self.work / name / "checkpoints", last)
            assert checkpoint.problem_of(path) is None
            files = json.loads((path / "manifest.json").read_text())["files"]
            digests.append({n: files[f"{n}.safetensors"]["sha256"] for n in ("model", "optimizer", "rng")})
            lines = [json.loads(line) for line in (self.work / name / "metrics.jsonl").read_text().splitlines()]
            losses.append({line["step"]: line["loss"] for line in lines if line["kind"] == "step"})
        return {
            "steps": last, "weights_moments_generators_equal": digests[0] == digests[1],
            "losses_equal": sum(losses[0].get(step) == losses[1][step] for step in range(last)),
            "begun_at": self._seen, "took_s": time.monotonic() - before, "digests": digests[0],
        }  # fmt: skip

    def _step(self) -> int:
        """The step at which a new process would begin."""
        return max(checkpoint.steps_in(self.work / "whole/checkpoints"), default=0)

    def _run(self, batch: int, end: int) -> "subprocess.Popen[bytes]":
        self._seen.append([self._step(), batch])
        words = self.command(
            "whole", *(["--resume=auto"] if self._step() else []), batch_size=batch,
            gradient_accumulation_steps=16 // batch, max_iters=end, eval_interval=1_000_000,
        )  # fmt: skip
        with (self.work / "whole.txt").open("a") as log:
            return subprocess.Popen(words, cwd=self.work, env=self.environment, stdout=log, stderr=log)

    def _certain(self) -> int:
        """The step before which the soak does nothing again: of the oldest checkpoint that it keeps."""
        return min(checkpoint.steps_in(self.work / "out/checkpoints"), default=0)

    def _follow(self) -> None:
        while not self._settled():
            if self.over.wait(1.0):
                return
        for (_, batch), (end, _) in zip(self._parts, self._parts[1:], strict=False):
            self._run(batch, end).wait()
        self._last_part(self._parts[-1][1])

    def _settled(self) -> bool:
        """Whether memory has run out as often as it will, and for good."""
        parts = segments(self.work / "out")
        if parts[-1][1] != 2 or self._certain() <= parts[-1][0]:
            return False
        self._parts = parts
        return True

    def _last_part(self, batch: int) -> None:
        """As far as the soak is certain, in one process that waits where it has caught up."""
        own, held = self._run(batch, 200_000), False
        watch = Watch(own.pid, self.work / "whole")
        while own.poll() is None and not self.over.wait(0.1):
            near = watch.last_step() > self._certain() - SAVE_EVERY
            if near != held:
                held = near
                own.send_signal(signal.SIGSTOP if near else signal.SIGCONT)
        last = checkpoint.steps_in(self.work / "out/checkpoints")[-1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(own.pid, signal.SIGCONT)
        while own.poll() is None and watch.last_step() < last - SAVE_EVERY:
            time.sleep(0.05)
        if own.poll() is None:
            own.send_signal(signal.SIGTERM)
        own.wait()
