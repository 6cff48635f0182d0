"""A whole optimizer step as one CUDA graph: a small model's kernels take less time than Python needs to launch them. A
replay's numbers are the recorded step's, but the learning rate is a float32. An evaluation is a second graph in the
memory of the first (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_float
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from foretrain.config.checks import is_one_graph
from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch
from foretrain.hardware.catalogue import Gpu
from foretrain.model.step import StepResult, TrainState, evaluation_loss, train_step

WARM_STEPS = 3  # the recording must not hold what the first steps compile, choose and allocate
Made = TypeVar("Made")
Replay = Callable[[], None]


class Recorder(Protocol):
    def aside(self) -> AbstractContextManager[None]: ...

    def record(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """Record what `work` launches without running it; return the replay and `work`'s result. Raises RuntimeError
        where `work` asks the device for something."""
        ...

    def make_room(self) -> None: ...


class OnCard:
    def __init__(self, state: TrainState) -> None:
        """Use an earlier recording's stream: each keeps memory, which a run short of it would take again."""
        self.device, self.dtype = state.device, state.dtype
        self.stream = state.aside = state.aside or torch.cuda.Stream(state.device)
        self._pool: Any = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """Record while another thread may page-lock batches (training/feed.py), which CUDA would otherwise refuse."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            made = work()
        self._pool = graph.pool()
        return graph.replay, made

    def make_room(self) -> None:
        """Free cuBLAS's workspaces: they hold segments that activations need."""
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream):
            small = torch.ones(8, 8, device=self.device, dtype=self.dtype)
            small.mm(small)


class GraphedStep:
    """`train_step` and `evaluation_loss` of a state: three eager steps, then a graph, or the reason in `failed`."""

    def __init__(
        self, state: TrainState, failed: Callable[[str], None] = lambda reason: None, on: Recorder | None = None
    ) -> None:
        self.state, self.failed, self.on = state, failed, on or OnCard(state)
        self.done = 0
        self._rate = torch.zeros((), device=state.device)
        self._batches: list[Batch] = []
        self._step: tuple[Replay, StepResult] | None = None
        self._evaluations: dict[torch.Size, tuple[Replay, Batch, Tensor]] = {}
        self._evaluated: set[torch.Size] = set()  # batch sizes for which evaluation is compiled
        optimizer: Any = state.optimizer
        optimizer.begin()  # a step would make moments among its activations and so keep their segments

    @property
    def left(self) -> int:
        return max(0, WARM_STEPS - self.done)

    @property
    def gave_up(self) -> bool:
        return self.done > WARM_STEPS and self._step is None

    def __call__(self, batches: Iterable[Batch], learning_rate: float) -> StepResult:
        """Run one optimizer step, eager ones with the graph's float32 rate. Raises what `train_step` raises."""
        learning_rate = c_float(learning_rate).value
        if self._step is None and (self.done < WARM_STEPS or self.gave_up):
            return self._as_always(batches, learning_rate)
        if self._step is None:
            if not self._evaluated:  # before a batch is taken, so that a step that fails here can be repeated
                self._evaluate_first()
            self._batches = [(ids.clone(), targets.clone()) for ids, targets in batches]
            self._record(learning_rate)
        else:
            for kept, batch in zip(self._batches, batches, strict=True):
                _write(kept, batch)
        if self._step is None:
            return self._as_always(self._batches, learning_rate)
        replay, result = self._step
        self._rate.fill_(learning_rate)
        replay()
        assert result.held is not None
        return StepResult(result.loss.clone(), result.grad_norm.clone(), result.held.clone())

    def evaluate(self, batch: Batch) -> Tensor:
        size = batch[0].shape
        if self._step is None:
            self._evaluated.add(size)
            with nullcontext() if self.gave_up else self.on.aside():
                return evaluation_loss(self.state, batch)
        if size not in self._evaluated:
            return evaluation_loss(self.state, batch)
        if size not in self._evaluations:
            kept = (batch[0].clone(), batch[1].clone())
            try:
                replay, loss = self.on.record(lambda: evaluation_loss(self.state, kept))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # it asks the card something: evaluations of this size stay eager
                self._evaluated.discard(size)
                return evaluation_loss(self.state, batch)
            self._evaluations[size] = replay, kept, loss
        replay, kept, loss = self._evaluations[size]
        _write(kept, batch)
        replay()
        return loss.clone()

    def _evaluate_first(self) -> None:
        """Evaluate now, as a resumed run has not yet: later it would be compiled beside the graph's memory."""
        c = self.state.config
        for rows in sorted({min(c.eval_batch, c.eval_rows), c.eval_rows % c.eval_batch} - {0}, reverse=True):
            ids = torch.zeros((rows, c.eval_block), dtype=torch.int64, device=self.state.device)
            self.evaluate((ids, ids))

    def _as_always(self, batches: Iterable[Batch], learning_rate: float) -> StepResult:
        self.done += 1
        with nullcontext() if self.gave_up else self.on.aside():
            return train_step(self.state, batches, learning_rate)

    def _record(self, learning_rate: float) -> None:
        state, reason = self.state, ""
        for group in state.optimizer.param_groups:
            group["capturable"] = True
        self.on.make_room()
        try:
            self._step = self.on.record(lambda: train_step(state, self._batches, self._rate))
        except RuntimeError as error:  # also where memory runs out
            reason = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"[:200]
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate  # recorded as a tensor of the graph's
        if not reason:
            return
        # Recording ran nothing. Here the exception, and what it held, is gone.
        self.done = WARM_STEPS + 1
        state.optimizer.zero_grad(set_to_none=True)
        getattr(state.scaler, "_per_optimizer_states", {}).clear()  # or it takes these gradients as already unscaled
        if state.masters:
            state.masters.drop_gradients()
        self.on.make_room()
        self.failed(reason)


def graphed_step(
    state: TrainState, gpu: Gpu, failed: Callable[[str], None] = lambda reason: None, asked: RunConfig | None = None
) -> GraphedStep | None:
    """Return the step of a state as one graph, where config/checks.py allows it; none after an out-of-memory error."""
    dtype: Any = str(state.dtype).removeprefix("torch.")
    configs = (state.config, asked or state.config)
    return GraphedStep(state, failed) if all(is_one_graph(each, gpu, dtype) for each in configs) else None


def _write(kept: Batch, new: Batch) -> None:
    for here, there in zip(kept, new, strict=True):
        here.copy_(there, non_blocking=True)
