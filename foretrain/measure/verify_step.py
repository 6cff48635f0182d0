"""One case on the real device, in its own process: the code that `plan --exact` traces, with random tokens."""

import functools
import os
import platform
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foretrain.base.installation import installed
from foretrain.base.process_memory import peak_bytes
from foretrain.base.processes import Parent
from foretrain.hardware.card import Cards, identity
from foretrain.measure.verify_record import Case
from foretrain.predict.trace import drive
from foretrain.predict.trace.names import Names
from foretrain.training.contention import Clock, Reading
from foretrain.training.device import keep_memory, obstacle_to_compile

MOST_STEPS, FEWEST_STEPS, ENOUGH_S = 20, 3, 4.0
UNTIMED = 1  # steady steps before the first that counts


class Enough(Exception):
    """Enough steps were timed, so the run can stop."""


class Watch:
    """Takes the tracer's place: at each change of phase it reads torch's counters, and the clock. `phases`: the peaks
    of each; `times`: seconds of each steady step, then raises Enough."""

    def __init__(self, device: torch.device, *, enough: bool = False) -> None:
        self.device, self.enough = device, enough
        self.phase, self.phases = "build", dict[str, dict[str, int]]()
        self.times: list[float] = []
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        self.close()
        self.phase = phase
        timed = self.times[UNTIMED:]
        if self.enough and len(timed) >= FEWEST_STEPS and (sum(timed) >= ENOUGH_S or len(timed) >= MOST_STEPS):
            raise Enough
        self._since = time.perf_counter()

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.phase == "steady_step":
            self.times.append(time.perf_counter() - self._since)
        if self.device.type != "cuda":
            return
        before = self.phases.get(self.phase, {"allocated_bytes": 0, "reserved_bytes": 0})
        now = {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }
        self.phases[self.phase] = {key: max(before[key], value) for key, value in now.items()}
        torch.cuda.reset_peak_memory_stats(self.device)

    def tag(self, *words: Any) -> None:
        pass


class RandomJob(drive.Job):
    """With tokens as in a text: many equal ones would make the embedding's backward pass wait for itself."""

    def _tokens(self, tensor: Tensor) -> Tensor:
        return super()._tokens(tensor.random_(0, self.config.vocab_size))


def run(case: Case, device: torch.device, watch: Any, *, kind: type[drive.Job] = RandomJob) -> None:
    job = kind(case.config, device, case.dtype, case.compiled, watch, Names(watch))
    drive.RUNS[case.step](job)


def prevent_overflow() -> None:
    """Let gradient scalers begin at 1: at 65,536 a small model's first steps overflow and are skipped."""
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=1.0)


def _prepare(case: Case, device: torch.device) -> None:
    """Set up a real run that does what was traced: all micro-steps, and steps enough to be timed."""
    drive.MICRO_STEPS = 1_000_000
    drive.STEPS = 3 + UNTIMED + MOST_STEPS
    torch.set_float32_matmul_precision("high")  # TF32, as both trainers set it
    prevent_overflow()
    if case.compiled:
        from torch._inductor import config as inductor

        # A cached kernel is not autotuned, which takes less memory than was traced.
        inductor.force_disable_caches = True
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_memory()  # as the trainer does


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    _prepare(case, device)
    watch, clock = Watch(device, enough=True), Clock()
    since = clock.read()
    try:
        run(case, device, watch)
        watch.close()
    except Enough:
        pass
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return {"out_of_memory": {"phase": watch.phase, "said": plain(str(error))}}
    timed = watch.times[UNTIMED:]
    found: dict[str, Any] = {"phases": watch.phases, "steps": len(timed)}
    if timed:
        found["step_s"] = median(timed)
    if device.type == "cpu":
        return {**found, "process_bytes": peak_bytes(), "others_share": others_share(since, clock)}
    process = _on_the_card(device)
    if process:
        found |= {"process_bytes": process, "context_bytes": max(0, process - torch.cuda.memory_reserved(device))}
    return found


def others_share(since: Reading, clock: Clock) -> float | None:
    now = clock.read()
    if now.busy_s is None or since.busy_s is None:
        return None
    others_s = max(0.0, (now.busy_s - since.busy_s) - (now.own_s - since.own_s))
    return others_s / max(1e-9, (now.at_s - since.at_s) * clock.cores)


def _is_out_of_memory(error: BaseException) -> bool:
    messages = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in messages)


def _on_the_card(device: torch.device) -> int | None:
    """Return NVML's figure for this process; None where it does not know it, as in some containers."""
    cards = Cards()
    index = cards.index_of(device.index or 0, **identity(torch.cuda.get_device_properties(device)))
    sample = cards.one(index, [os.getpid()])
    return (sample.ours_bytes or None) if sample else None


def plain(text: str) -> str:
    """Return the first line of what was raised, without the folders of paths, which can hold somebody's name."""
    line = (text.strip() or "nothing was said").splitlines()[0].replace(str(Path.home()), "/home")
    line = re.sub(r"(?:[A-Za-z]:)?[\w.~+@-]*[\\/](?:[^\s'\"\\/]+[\\/])*(?=[^\s'\"\\/]+)", "…/", line)
    return re.sub(r"[^ -~…]+", " ", line)[:160]


def seen(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda or "", "python": platform.python_version(),
        "triton": installed("triton"),
    }  # fmt: skip
    if device.type == "cpu":
        return found
    if not torch.cuda.is_available() or torch.version.cuda is None:  # AMD's cards call themselves cuda, too
        return {**found, "count": 0}
    found["count"] = torch.cuda.device_count()
    if (device.index or 0) >= found["count"]:
        return found
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        **found, "name": properties.name, "memory_bytes": total, "free_bytes": free, **identity(properties),
        "sm_count": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
        "obstacle": obstacle_to_compile(device) or "",
    }  # fmt: skip


def answer(job: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(job["device"])
    if device.type == "cuda" and device.index is None:  # some of torch's functions take no card without its number
        device = torch.device("cuda", 0)
    if job["what"] == "device":
        return seen(device)
    try:
        return measured(Case.model_validate(job["case"]), device)
    except Exception as error:
        return {"error": plain(f"{type(error).__name__}: {error}")}


def main(parent: Parent) -> None:
    if (job := parent.receive()) is not None:
        parent.send(answer(job.value))
