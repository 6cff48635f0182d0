"""A run's records of its machine for `foretrain explain`, made while an exception lives, so they hold nothing."""

import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from foretrain.base import oom_message
from foretrain.base.process_memory import resident_bytes
from foretrain.hardware.card import Cards, CardSample, identity
from foretrain.hardware.cpu import available_memory_bytes, total_memory_bytes
from foretrain.model.allocated import storage_bytes
from foretrain.model.step import TrainState
from foretrain.runs.folder import RunDirectory
from foretrain.training.attempts import is_out_of_memory

EVERY_S = 1.0
# What lowers a card's clock beyond its own power limit, and in how many samples in a row it has to.
_THROTTLING = ("thermal", "hardware_thermal", "hardware_slowdown", "power_brake")
_SAMPLES, _REPORT_EVERY_S = 5, 600.0
MAX_MESSAGE = 400
# Where in a step memory ran out: the first of these that a frame of the traceback shows, from the innermost out.
_MOMENTS = (
    ("batch", ("foretrain/data/batches.py",)), ("optimizer", ("torch/optim/", "model/low_bit_adamw", "model/muon.py",
    "model/master.py", "clip_grad.py", "grad_scaler")), ("backward", ("torch/autograd/", "torch/_tensor.py")), ("loss",
    ("foretrain/model/loss.py",)), ("saving", ("training/checkpoint.py",)), ("forward", ("foretrain/model/",
    "torch/nn/", "torch/_dynamo/", "torch/_inductor/")),
)  # fmt: skip


class Vitals:
    """Watches one run in its directory. `nvml` and `cuda` are stand-ins for tests."""

    def __init__(self, directory: RunDirectory, device: torch.device, nvml: Any = None, cuda: Any = None) -> None:
        self.directory, self.device = directory, device
        self.cuda = cuda or torch.cuda
        self._nvml = nvml
        self._cards: Cards | None = None
        self._index: int | None = None  # NVML's
        self._asked_s = -EVERY_S
        self._cpu_s = time.process_time()
        self.clocks = Clocks()
        self._fastest_ghz, self._throttled, self._reported_s = 0.0, 0, -_REPORT_EVERY_S
        self._odd: list[tuple[str, dict[str, Any]]] = []

    def now(self) -> dict[str, Any]:
        """Return keys for a line of metrics.jsonl: `cpu_s`, a card's memory, clock, power, heat, throttling, users."""
        cpu_s, before_s = time.process_time(), self._cpu_s
        self._cpu_s = cpu_s
        found: dict[str, Any] = {"cpu_s": round(cpu_s - before_s, 4)}
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):
                found["allocated_bytes"] = self.cuda.memory_allocated(self.device)
                if time.monotonic() - self._asked_s >= EVERY_S:
                    self._asked_s = time.monotonic()
                    found |= self._card_now()
        return found

    def _card_now(self) -> dict[str, Any]:
        sample = self._sample()
        if sample is None or sample.empty:
            return {}
        self._watch_clock(sample)
        found = {
            "clock_ghz": sample.clock_ghz, "power_w": sample.power_w, "temperature_c": sample.temperature_c,
            "clock_reasons": list(sample.reasons),
        }  # fmt: skip
        if sample.used_bytes is not None and sample.ours_bytes:
            found["used_by_others_bytes"] = max(0, sample.used_bytes - sample.ours_bytes)
        return {key: value for key, value in found.items() if value is not None}

    def _watch_clock(self, sample: CardSample) -> None:
        clock_ghz = sample.clock_ghz or 0.0
        self._fastest_ghz = max(self._fastest_ghz, clock_ghz)
        reasons = [reason for reason in _THROTTLING if reason in sample.reasons]
        self._throttled = self._throttled + 1 if reasons else 0
        if self._throttled >= _SAMPLES and time.monotonic() - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            values = {"reasons": reasons, "clock_ghz": clock_ghz, "fastest_ghz": self._fastest_ghz}
            values |= {"temperature_c": sample.temperature_c or 0, "power_w": sample.power_w or 0.0}
            self._odd.append(("throttled", values))

    def odd(self) -> list[tuple[str, dict[str, Any]]]:
        found, self._odd = [*self._odd, *self.clocks.look()], []
        return found

    def _sample(self) -> CardSample | None:
        if self._cards is None:
            self._cards = Cards(self._nvml)
            more: dict[str, str] = {}
            with contextlib.suppress(Exception):
                more = identity(self.cuda.get_device_properties(self.device))
            self._index = self._cards.index_of(self.device.index or 0, **more)
        return self._cards.one(self._index, (os.getpid(),))

    def watching(self, state: TrainState, phase: str, step: int) -> Callable[[BaseException, int], None]:
        """Return a function of (the exception, micro-steps begun) for out-of-memory errors in this phase."""
        return lambda error, micro_step: self.ran_out(error, state, step, phase=phase, micro_step=micro_step)

    def ran_out(
        self, error: BaseException, state: TrainState | None, step: int, *, phase: str = "", micro_step: int = 0
    ) -> None:
        if not is_out_of_memory(error):
            return
        with contextlib.suppress(Exception):
            values = {"phase": phase, "moment": moment_of(error.__traceback__), "step": step, "micro_step": micro_step}
            values |= self._figures(str(error)) | (live(state) if state is not None else {})
            self.directory.event("out_of_memory", **values)

    def _figures(self, message: str) -> dict[str, Any]:
        parsed = oom_message.parse(message)
        values: dict[str, Any] = {"message": " ".join(message.split())[:MAX_MESSAGE]}
        if parsed is not None:
            values |= parsed.figures()
        values |= self._of_card() if self.device.type == "cuda" else of_host()
        return values

    def _of_card(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(Exception):
            found["allocated_bytes"] = self.cuda.memory_allocated(self.device)
            found["reserved_bytes"] = self.cuda.memory_reserved(self.device)
            found["unused_bytes"] = found["reserved_bytes"] - found["allocated_bytes"]
            found["free_bytes"], found["card_bytes"] = self.cuda.mem_get_info(self.device)
        sample = self._sample()
        if sample is not None and sample.used_bytes is not None and sample.ours_bytes:
            found["process_bytes"] = sample.ours_bytes
            found["used_by_others_bytes"] = max(0, sample.used_bytes - sample.ours_bytes)
        return found


def of_host() -> dict[str, int]:
    found: dict[str, int] = {}
    resident = resident_bytes()
    if resident is not None:
        found["process_bytes"] = resident
    free, total = available_memory_bytes(), total_memory_bytes()
    if free is not None:
        found["free_bytes"], found["card_bytes"] = free, total
        if resident is not None:
            found["used_by_others_bytes"] = max(0, total - free - resident)
    return found


def live(state: TrainState) -> dict[str, int]:
    """Return the bytes of a state, and how it is split into micro-batches."""
    moments = (v for s in state.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    config = state.config
    return {
        "weights_bytes": storage_bytes(iter([*state.model.parameters(), *state.trained.parameters()])),
        "gradients_bytes": storage_bytes(p.grad for p in state.trained.parameters() if p.grad is not None),
        "optimizer_bytes": storage_bytes(moments),
        "batch_size": config.batch_size, "accumulation": config.gradient_accumulation_steps,
        "eval_batch": config.eval_batch,
    }  # fmt: skip


def moment_of(trace: TracebackType | None) -> str:
    files: list[str] = []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename.replace("\\", "/"))
        trace = trace.tb_next
    for file in reversed(files):
        for moment, parts in _MOMENTS:
            if any(part in file for part in parts):
                backward = any("torch/autograd/" in file or file.endswith("torch/_tensor.py") for file in files)
                return "backward" if moment == "forward" and backward else moment
    return "other"


SUSPENDED_S, SET_S = 2.0, 60.0  # less is not reported: NTP moves a clock by fractions of a second


def _with_suspends() -> float:
    """Return seconds since the start of the machine, on Linux including suspends."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(number) if number is not None else time.monotonic()


class Clocks:
    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, boot: Callable[[], float] = _with_suspends,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._clocks = monotonic, boot, wall
        self._suspended_s, self._moved_s = self._gaps()

    def _gaps(self) -> tuple[float, float]:
        monotonic, boot, wall = (clock() for clock in self._clocks)
        return boot - monotonic, wall - boot

    def look(self) -> list[tuple[str, dict[str, Any]]]:
        before, (suspended_s, moved_s) = (self._suspended_s, self._moved_s), self._gaps()
        self._suspended_s, self._moved_s = suspended_s, moved_s
        found: list[tuple[str, dict[str, Any]]] = []
        if (gap := suspended_s - before[0]) > SUSPENDED_S:
            found.append(("suspended", {"seconds": gap}))
        if abs(gap := moved_s - before[1]) > SET_S:
            found.append(("clock_set_on" if gap > 0 else "clock_set_back", {"seconds": abs(gap)}))
        return found
