"""One process in PyTorch's CUDA build on the fake card: cases on standard input, each measured in a fork of its own.

    {"knobs", "dtype", "step", "compiled", "out"} a line; the answer is a file, and its name on standard output.

What is written down: allocated and reserved peaks by phase as torch counts them, every allocation and free in order,
the segments, and the branches that the host took, here and at a small size on the CPU.
"""

import contextlib
import functools
import gc
import gzip
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foretrain.config.checks import launched
from foretrain.model.graphed import WARM_STEPS
from foretrain.predict.trace import drive
from foretrain.predict.trace.names import Names
from tests.cuda_build.branches import Branches
from tests.cuda_build.branches import differences as branch_differences
from tests.cuda_build.grid import shrunk

STEPS = drive.STEPS
MOST_ENTRIES = 2_000_000
PROCESSOR_SECONDS = 900  # a case that takes more is ended


class Watch:
    """Stands where the tracer does: at each change of phase it reads torch's counters."""

    def __init__(self) -> None:
        self.phase, self.phases, self.marks = "build", {}, [(0, "build")]

    def enter(self, phase: str) -> None:
        self.close()
        self.phase = phase
        self.marks.append((torch.cuda.memory_stats()["allocation.all.allocated"], phase))

    def close(self) -> None:
        before = self.phases.get(self.phase, {"allocated_bytes": 0, "reserved_bytes": 0})
        now = {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        self.phases[self.phase] = {key: max(before[key], value) for key, value in now.items()}
        torch.cuda.reset_peak_memory_stats()

    def tag(self, *words: Any) -> None:
        """The tracer names tensors; nobody asks for names here."""


class Still(Watch):
    """The same on the CPU, which has no counters."""

    def enter(self, phase: str) -> None: ...


def run(
    job: dict[str, Any], settings: dict[str, Any], device: str, watch: Watch, *, compiled: bool, share: Any = None
) -> Branches:
    with Branches() as branches:
        config = launched(settings)
        where = torch.device(device)
        drive.RUNS[job["step"]](drive.Job(config, where, job["dtype"], compiled, watch, Names(watch), share))  # type: ignore[arg-type]
    return branches


@contextlib.contextmanager
def no_overflow() -> Iterator[None]:
    """Gradient scalers begin at 1: at 65,536 a small model's first steps overflow, which no step of the card does."""
    original = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(original, init_scale=1.0)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler = original  # type: ignore[misc]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """A case, on the card and then small on the CPU. Raises what the run raises."""
    import torch._inductor.config

    drive.MICRO_STEPS = 1_000_000  # a trace stops at three; a run does all of them
    drive.STEPS = WARM_STEPS + 1 if job["knobs"].get("cuda_graph") == "on" else STEPS  # what Python does of a graph's
    torch._inductor.config.force_disable_caches = True  # or what an earlier case measured would not be measured again
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_ENTRIES)
    watch = Watch()
    branches = run(job, job["knobs"], "cuda", watch, compiled=job["compiled"]).record()
    watch.close()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    stats = torch.cuda.memory_stats()
    torch.cuda.memory._record_memory_history(enabled=None)
    with no_overflow():
        real = run(job, shrunk(job["knobs"]), "cpu", Still(), compiled=False).record()
    return {
        "phases": watch.phases, "marks": watch.marks, **history(entries),
        "num_alloc_retries": stats["num_alloc_retries"], "branches": branch_differences(branches, real),
    }  # fmt: skip


def history(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Events as a trace has them (`id` a birth, `~id` a death), sizes as asked for, and segments with their place."""
    events: list[int] = []
    sizes: list[int] = []
    segments: list[tuple[int, str, int]] = []
    alive: dict[int, int] = {}
    for entry in entries:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            alive[address] = len(sizes)
            events.append(len(sizes))
            sizes.append(size)
        elif action == "free_completed" and address in alive:
            events.append(~alive.pop(address))
        elif action.startswith("segment_"):
            segments.append((len(events), action, size))
    return {"events": events, "sizes": sizes, "segments": segments}


def _forked(job: dict[str, Any]) -> None:
    """Measure a case in a child; the file has its answer or its error, whatever becomes of the child."""
    out = Path(job["out"])
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
            try:
                found = measure(job)
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
            found["seconds"] = round(time.monotonic() - started, 1)
            write(out, found)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not out.exists():
        code = os.waitstatus_to_exitcode(status)
        write(out, {"error": f"the process ended with {code}", "seconds": round(time.monotonic() - started, 1)})


def write(out: Path, found: dict[str, Any]) -> None:
    """Under its name only when whole."""
    staging = out.with_suffix(".staging")
    staging.write_bytes(gzip.compress(json.dumps(found).encode(), 3))
    staging.replace(out)


def main() -> None:
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx  # noqa: F401  # once for all children

    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        _forked(job)
        print(job["out"], flush=True)


if __name__ == "__main__":
    main()
