"""A whole optimizer step as one CUDA graph: the host asks for it once, and the card does all of its kernels.

A small model's kernels take less time than Python needs to launch them. A graph is recorded once and replayed
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs): the same kernels on the same addresses, so the
numbers are those of the step that was recorded. Batches and the learning rate are written where the graph reads them.
An evaluation is a second graph in the memory of the first, whose activations nobody needs by then.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrain.model.step import StepResult, TrainState, evaluation_loss, train_step

if TYPE_CHECKING:
    from foretrain.data.batches import Batch

WARM_STEPS = 3  # before the recording: what is compiled, chosen and allocated at first must not be in it


class GraphedStep:
    """`train_step` and `evaluation_loss` of a state. The first steps run as they always do; the fourth is recorded.

    Where it cannot be recorded, for want of memory or because something in it asks the card, it stays as it is, and
    `failed` is told why.
    """

    def __init__(self, state: TrainState, failed: Callable[[str], None] = lambda reason: None) -> None:
        self.state, self.failed = state, failed
        self.done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(state.device)  # recorded on it, and warmed up, as autograd keeps to a stream
        self._rate = torch.zeros((), device=state.device)
        self._batches: list[Batch] = []
        self._result: StepResult | None = None
        self._evaluation: tuple[torch.cuda.CUDAGraph, Batch, Tensor] | None = None

    @property
    def gives_up(self) -> bool:
        """Whether steps stay as they are."""
        return self.done > WARM_STEPS and self.graph is None

    def __call__(self, batches: "Iterable[Batch]", learning_rate: float) -> StepResult:
        """One optimizer step. The result's tensors are this step's own. Raises what `train_step` raises."""
        if self.graph is None:
            if self.done < WARM_STEPS or self.gives_up:
                return self._as_always(batches, learning_rate)
            batches = self._kept(batches)
            self._record(learning_rate)
            if self.graph is None:
                return self._as_always(batches, learning_rate)
        else:
            for kept, batch in zip(self._batches, batches, strict=True):
                for here, new in zip(kept, batch, strict=True):
                    here.copy_(new, non_blocking=True)
        self._rate.fill_(learning_rate)
        self.graph.replay()
        assert self._result
        return StepResult(*(None if value is None else value.clone() for value in vars(self._result).values()))

    def evaluate(self, batch: "Batch") -> Tensor:
        """The loss of one batch, a scalar of its own; as a graph once a step is one, for batches of one size."""
        if self.graph is None:
            with self._aside():
                return evaluation_loss(self.state, batch)
        if self._evaluation is None:
            self._evaluation = self._recorded_evaluation(batch)
        graph, kept, loss = self._evaluation
        if kept[0].shape != batch[0].shape:  # the last rows of a split
            return evaluation_loss(self.state, batch)
        for here, new in zip(kept, batch, strict=True):
            here.copy_(new, non_blocking=True)
        graph.replay()
        return loss.clone()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is recorded has to be warmed up on another stream than torch's own; all of it on the same one, as each
        stream keeps memory for itself."""
        if self.gives_up:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def _as_always(self, batches: "Iterable[Batch]", learning_rate: float) -> StepResult:
        self.done += 1
        with self._aside():
            found = train_step(self.state, batches, learning_rate)
        if self.done == 1:
            self._make_room()
        return found

    def _kept(self, batches: "Iterable[Batch]") -> "list[Batch]":
        """The micro-batches where the graph will read them."""
        self._batches = [(ids.clone(), targets.clone()) for ids, targets in batches]
        return self._batches

    def _record(self, learning_rate: float) -> None:
        graph = torch.cuda.CUDAGraph()
        state, reason = self.state, ""
        self._rate.fill_(learning_rate)
        for group in state.optimizer.param_groups:
            group["capturable"] = True
        self._make_room()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = train_step(state, self._batches, self._rate)  # type: ignore[arg-type]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate  # recorded as a tensor of the graph's
        if not reason:
            self.graph = graph
            return
        # Nothing has run: recording only writes kernels down. Here the exception is gone, and what it held with it.
        self.done, self._result = WARM_STEPS + 1, None
        state.optimizer.zero_grad(set_to_none=True)
        if state.masters:
            state.masters.drop_gradients()
        gc.collect()
        torch.cuda.empty_cache()
        self.failed(reason)

    def _make_room(self) -> None:
        """Let the allocator give back all that the first steps took: a graph has memory of its own, and finds no use
        for it. Moments were made in the room of activations, whose segments they hold; they are made anew."""
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        moments = self.state.optimizer.state
        kept = {
            parameter: {name: value.cpu() for name, value in own.items() if isinstance(value, Tensor) and value.is_cuda}
            for parameter, own in moments.items()
        }
        for parameter, own in kept.items():
            for name in own:
                del moments[parameter][name]
        gc.collect()
        torch.cuda.empty_cache()
        for parameter, own in kept.items():
            moments[parameter] |= {name: value.to(self.state.device) for name, value in own.items()}
        with torch.cuda.stream(self._stream):  # cuBLAS's workspace, too, would be made in the room of activations
            small = torch.ones(8, 8, device=self.state.device)
            small @ small
            small.to(self.state.dtype) @ small.to(self.state.dtype)

    def _recorded_evaluation(self, batch: "Batch") -> "tuple[torch.cuda.CUDAGraph, Batch, Tensor]":
        assert self.graph
        kept = (batch[0].clone(), batch[1].clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph.pool(), stream=self._stream):
            loss = evaluation_loss(self.state, kept)
        return graph, kept, loss
