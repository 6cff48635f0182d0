"""A whole optimizer step as one CUDA graph: the host asks for it once, and the card does all of its kernels.

A small model's kernels take less time than Python takes to ask for them. A graph is recorded once and replayed
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs): the same kernels on the same addresses, so the
numbers are those of the step that was recorded. Batches and the learning rate are written where the graph reads them.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from foretrain.model.step import StepResult, TrainState, train_step

if TYPE_CHECKING:
    from foretrain.data.batches import Batch

WARM_STEPS = 3  # before the recording: what is compiled, chosen and allocated at first must not be in it


class GraphedStep:
    """`train_step` of a state, recorded in the fourth step. Steps before it run as they always do.

    The graph keeps the memory of a step's activations for itself, so an evaluation needs its own beside it.
    """

    def __init__(self, state: TrainState) -> None:
        c, device = state.config, state.device
        shape = (c.gradient_accumulation_steps, c.batch_size, c.block_size)
        self.state, self.done = state, 0
        self.ids, self.targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        self.rate = torch.zeros((), device=device)
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: StepResult | None = None
        for group in state.optimizer.param_groups:
            group["capturable"] = True

    def __call__(self, batches: "Iterable[Batch]", learning_rate: float) -> StepResult:
        """One optimizer step. The result's tensors are this step's own."""
        for number, (ids, targets) in enumerate(batches):
            self.ids[number].copy_(ids, non_blocking=True)
            self.targets[number].copy_(targets, non_blocking=True)
        self.rate.fill_(learning_rate)
        if self.done < WARM_STEPS:
            self.done += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                found = self._step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return found
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self._step()
        self.graph.replay()
        assert self.result
        return StepResult(*(None if value is None else value.clone() for value in vars(self.result).values()))

    def _step(self) -> StepResult:
        batches = zip(self.ids.unbind(), self.targets.unbind(), strict=True)
        return train_step(self.state, batches, self.rate)  # type: ignore[arg-type]
