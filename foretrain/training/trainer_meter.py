"""`PhaseMeter`: the memory of each phase of another trainer in this process, by CUDA's allocator, or on a CPU by the
profiler in a few steps, one evaluation and one save."""

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, profile

from foretrain.base.process_memory import peak_bytes
from foretrain.model.allocated import OF_TWO_DTYPES, sizes, storage_bytes
from foretrain.runs.record import MeasuredMemory, MeasuredPhase

ON_CPU = {"first_step": 1, "steady_step": 2, "evaluate": 1, "save": 1}  # how often a phase is watched there
ORDER = ("load", "first_step", "steady_step", "evaluate", "save")


def held_tensors(model: Any, optimizer: Any) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    states = getattr(optimizer, "state", {})
    found += [v for state in states.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t for t in found if t.layout == torch.strided]


class PhaseMeter:
    """Measures phases one after the other into `memory`; `resets`: whether a card's peaks may be reset between them."""

    def __init__(self, model: Any, device: torch.device, *, resets: bool = True, on_cpu: bool = True) -> None:
        self.model, self.device, self.resets = model, device, resets
        self.on_cpu = on_cpu and device.type == "cpu"  # nothing counts an Apple GPU's memory here
        self.optimizer: Any = None
        self.phase = ""
        self.found: dict[str, MeasuredPhase] = {}
        self.seen: Counter[str] = Counter()
        self._before = 0  # a card's highest peak of earlier phases
        self._running: profile | None = None
        self._standing: int | None = None  # bytes held where the profiler began

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def memory(self, before: MeasuredMemory) -> MeasuredMemory:
        """Return all phases so far; phases that have not recurred since a resume are as measured `before` it."""
        self.look()
        known = {phase.phase: phase for phase in before.phases} | self.found
        if not known:
            return before
        method = "cuda allocator" if self.cuda else "cpu allocator (profiler)"
        return MeasuredMemory(
            method=method, phases=tuple(known[name] for name in ORDER if name in known),
            weights_bytes=storage_bytes(iter(self.model.parameters())), process_peak_bytes=peak_bytes(),
        )  # fmt: skip

    def load(self) -> None:
        """Note what is held before the first step: on CUDA with the peak of loading."""
        if self.cuda:
            self._take(
                "load", torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
            )
        elif self.on_cpu:
            self._take("load", storage_bytes(iter(held_tensors(self.model, None))), None)

    def begin(self, phase: str) -> None:
        self.end()
        self.phase = phase
        if self.cuda:
            if self.resets:
                torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.max_memory_allocated(self.device)
        elif self.on_cpu and self.seen[phase] < ON_CPU[phase] and not _profiler_enabled():
            if self._standing is None:
                self._standing = storage_bytes(iter(held_tensors(self.model, self.optimizer)))
            running = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            running.start()
            self._running = running

    def done(self) -> None:
        self.seen[self.phase] += 1
        if self._running is not None and self.seen[self.phase] >= ON_CPU[self.phase]:
            self.end()

    def look(self) -> None:
        if self.cuda and self.phase:
            self._look(self.phase)

    def end(self) -> None:
        self.look()
        if self._running is not None:
            running, self._running = self._running, None
            running.stop()
            _, tensors = sizes(running, OF_TWO_DTYPES)
            highest = [self._standing or 0, *accumulate(tensors, initial=self._standing or 0)]
            self._take(self.phase, max(highest), None)
            self._standing = highest[-1]

    def held_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.device) if self.cuda else None

    def _look(self, phase: str) -> None:
        device = self.device
        allocated = torch.cuda.max_memory_allocated(device)
        if self.resets or allocated > self._before:  # else the peak may be that of an earlier phase
            self._take(phase, allocated, torch.cuda.max_memory_reserved(device))

    def _take(self, phase: str, allocated: int, reserved: int | None) -> None:
        before = self.found.get(phase)
        if before is not None:
            allocated = max(allocated, before.allocated_bytes or 0)
            reserved = max(reserved, before.reserved_bytes or 0) if reserved is not None else None
        self.found[phase] = MeasuredPhase(
            phase=phase, allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=None
        )


# A callback hears nothing of an exception. So the Trainer's own methods get a wrapper on the instance that reports
# beginnings, ends and failures, and changes nothing.

PARTS = {"training_step": "micro_batch", "evaluate": "evaluate", "_save_checkpoint": "save"}
MOST_FRAMES = 40


class Listener(Protocol):
    """Hears of the parts. None of these may raise."""

    def entered(self, part: str, args: tuple[Any, ...]) -> None: ...

    def left(self, part: str) -> None: ...

    def failed(self, part: str, error: BaseException) -> None: ...


def calling_trainer() -> Any:
    frame: FrameType | None = inspect.currentframe()
    for _ in range(MOST_FRAMES):
        frame = frame.f_back if frame else None
        if frame is None:
            return None
        found = frame.f_locals.get("self")
        if all(hasattr(type(found), name) for name in ("train", "training_step", "evaluate")):
            return found
    return None


class Hooks:
    """Wrappers around a Trainer's methods, and around sys.excepthook for what ends the program between them."""

    def __init__(self, trainer: Any, optimizer: Any, listener: Listener) -> None:
        self.listener = listener
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, ours, the original
        self._before = sys.excepthook
        self._failing = 0  # the id of the reported error; never the error, whose frames hold tensors
        if trainer is not None:
            for name, part in PARTS.items():
                self._wrap(trainer, name, part)
        if optimizer is not None:
            self._wrap(optimizer, "step", "optimizer")
        sys.excepthook = self._at_the_end

    def remove(self) -> None:
        for owner, name, ours, before in reversed(self._set):
            if vars(owner).get(name) is not ours:  # somebody wrapped it again
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._set.clear()
        if sys.excepthook == self._at_the_end:
            sys.excepthook = self._before

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            return
        before = vars(owner).get(name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._failing = 0
            self.listener.entered(part, (*args, *kwargs.values()))
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._report(part, error)
                raise
            self.listener.left(part)
            return result

        setattr(owner, name, wrapped)
        self._set.append((owner, name, wrapped, before))

    def _report(self, part: str, error: BaseException) -> None:
        if id(error) != self._failing:  # one within another part is reported once
            self._failing = id(error)
            self.listener.failed(part, error)

    def _at_the_end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._report("", error)
        self._before(kind, error, trace)
