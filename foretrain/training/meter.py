"""Measured memory of each phase: PyTorch's allocator on a GPU; on a CPU its allocator as the profiler sees it, and the
process's peak as the system counts it. Each phase is sampled once, so measuring costs nothing afterwards."""

import gc
import math
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile  # that of torch.profiler imports Inductor

from foretrain.base.process_memory import peak_bytes, resident_bytes
from foretrain.hardware import accelerator
from foretrain.model.allocated import storage_bytes
from foretrain.model.step import TrainState
from foretrain.runs.record import MeasuredMemory, MeasuredPhase

_CLEAR = Path("/proc/self/clear_refs")


def _reset_process_peak() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def allocator_peak(run: Any) -> int:
    events: list[tuple[int, int]] = []
    own: Any = run if isinstance(run, profile) else run.profiler
    stack = list(own.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.tag == _EventType.Allocation:
            fields: Any = node.extra_fields
            if fields.device.type == "cpu":
                events.append((node.start_time_ns, fields.alloc_size))
    current = peak = 0
    for _, size in sorted(events):
        current += size
        peak = max(peak, current)
    return peak


class Meter:
    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self.device, self.limit_bytes = device, limit_bytes
        self.accelerator = accelerator.accelerator_of(device)
        if device.type == "cpu":
            gc.collect()  # cycles of an earlier run would be freed while this one is measured
        self.base_bytes = resident_bytes()
        self.phases: dict[str, MeasuredPhase] = {}
        self.saved_bytes: int | None = None
        self.gradients_bytes: int | None = None
        self._hook: Any = None

    @property
    def method(self) -> str:
        return self.accelerator.method

    def wants(self, phase: str) -> bool:
        return phase not in self.phases

    @contextmanager
    def phase(self, name: str, state: TrainState) -> Iterator[None]:
        if not self.wants(name):
            yield
        elif self.accelerator.counts:
            self.accelerator.reset_peaks()
            yield
            self.accelerator.synchronize()
            allocated, reserved = self.accelerator.peaks()
            self.phases[name] = MeasuredPhase(
                phase=name, allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=peak_bytes()
            )
        else:
            standing = self.weights(state) + self.optimizer(state)
            can_reset = _reset_process_peak()
            with profile(profile_memory=True) as run:
                yield
            self.phases[name] = MeasuredPhase(
                phase=name,
                allocated_bytes=standing + allocator_peak(run),
                process_bytes=peak_bytes() if can_reset else None,
            )

    def watch(self, state: TrainState, *, compiled: bool) -> None:
        self._watch_gradients(state)
        shards = state.parallel is not None and state.parallel.sharing.way.shards_weights
        if compiled or shards:  # hooks would change the compiled graph, and see gathered weights
            return
        model, own = state.call, {p.untyped_storage().data_ptr() for p in state.model.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a tensor that its own node holds would outlive a failed step

        def once(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            state.call = model
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(idx, targets)
            self.saved_bytes = sum(saved.values())
            return loss

        state.call = once

    def _watch_gradients(self, state: TrainState) -> None:
        if self._hook is not None:  # of a step that ran out of memory before its optimizer
            self._hook.remove()

        def once(*_: object) -> None:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            self.gradients_bytes = storage_bytes(p.grad for p in state.trained.parameters() if p.grad is not None)

        self._hook = state.optimizer.register_step_pre_hook(once)

    def weights(self, state: TrainState) -> int:
        """Count the model's own, and their fp32 masters where they are not the same."""
        return storage_bytes(chain(state.model.parameters(), state.trained.parameters()))

    def optimizer(self, state: TrainState) -> int:
        tensors = (v for s in state.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        return storage_bytes(tensors)

    def process_peak(self) -> int | None:
        """Return the process's highest memory so far: VmHWM is reset with each phase, so theirs count too."""
        seen = [peak_bytes(), *(phase.process_bytes for phase in self.phases.values())]
        return max((size for size in seen if size is not None), default=None)

    def device_bytes(self) -> int | None:
        """Return the memory in use now, for the progress line: reserved on a GPU, the process on a CPU."""
        return self.accelerator.reserved() if self.accelerator.counts else resident_bytes()

    def result(self, state: TrainState) -> MeasuredMemory:
        return MeasuredMemory(
            method=self.method,
            phases=tuple(self.phases.values()),
            weights_bytes=self.weights(state),
            gradients_bytes=self.gradients_bytes,
            optimizer_bytes=self.optimizer(state),
            saved_bytes=self.saved_bytes,
            process_base_bytes=self.base_bytes,
            process_peak_bytes=self.process_peak(),
            limit_bytes=self.limit_bytes,
        )

    def empty(self) -> MeasuredMemory:
        return MeasuredMemory(method=self.method, process_base_bytes=self.base_bytes, limit_bytes=self.limit_bytes)


WARM_STEPS = 3  # the first ones allocate, compile and are measured
RECENT = 20
FORECAST_COUNTS = 2  # as much as so many measured lines


class Pace:
    """Seconds, of a clock that the caller reads. `expected`: of a step and of an evaluation, by the forecast."""

    def __init__(self, expected: tuple[float, float] | None = None) -> None:
        self.expected = expected
        self.step_times, self.evaluation_times = array("d"), array("d")  # lists take four times the memory
        self._last_s, self._last_step, self._paused_s = 0.0, 0, 0.0

    def begin(self, at_s: float, step: int) -> None:
        self._last_s, self._last_step, self._paused_s = at_s, step, 0.0

    def pause(self, seconds: float) -> None:
        self._paused_s += seconds

    def step_s(self, at_s: float, step: int) -> float:
        taken = (at_s - self._last_s - self._paused_s) / (step + 1 - self._last_step)
        self.begin(at_s, step + 1)
        if step >= WARM_STEPS:
            self.step_times.append(taken)
        return taken

    def eta_s(self, step: int, step_s: float, max_iters: int, eval_interval: int) -> float:
        """Estimate the rest of the run, evaluations included: by the forecast first, then by measurements."""
        remaining = max_iters - step - 1
        recent = self.step_times[-RECENT:]  # one slow step must not frighten
        each_s = median(recent) if recent else step_s
        if self.expected is not None:
            expected_s = self.expected[0] or each_s
            each_s = (FORECAST_COUNTS * expected_s + len(recent) * each_s) / (FORECAST_COUNTS + len(recent))
            each_s = each_s if recent else expected_s
        evaluation_s = self.median_evaluation_s or (self.expected[1] if self.expected else 0.0)
        return remaining * each_s + math.ceil(remaining / eval_interval) * evaluation_s

    @property
    def median_step_s(self) -> float | None:
        return median(self.step_times) if self.step_times else None

    @property
    def median_evaluation_s(self) -> float | None:
        return median(self.evaluation_times) if self.evaluation_times else None
