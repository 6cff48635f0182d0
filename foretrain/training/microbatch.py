"""Out of memory without changed learning: an optimizer step is tried, and taken back where its micro-steps did not fit.

The rules. Up to the last backward pass nothing has been changed but gradients and the generator of dropout, so the step
can be taken back and done again with a smaller micro-batch: the same rows in the same order, cut differently. From
the optimizer on weights may have changed, so a failure there ends the run. What an exception holds (its frames, and
with them every activation) has to be gone before memory is freed, so nothing is done inside an `except` block.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch
from foretrain.model.step import StepResult, TrainState
from foretrain.training.compilation import NotCompiled, not_compiled
from foretrain.training.host_memory import give_back

# What PyTorch, CUDA's libraries and the system say; torch.OutOfMemoryError is known by its type.
_MESSAGES = (
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation", "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory", "MPS backend out of memory", "Triton Error [CUDA]: out of memory",
    "Cuda failure 'out of memory'", "Cuda failure 2 'out of memory'",  # as NCCL says it
)  # fmt: skip

Failure = Literal["micro_step", "optimizer", "stopped"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a card or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass(frozen=True)
class Generators:
    """The state of PyTorch's generators on the host and on the run's card: what dropout draws from."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "Generators":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


class _Stopped(Exception):
    """A stop was asked for between two micro-steps."""


class _Watched:
    """Batches that remember whether the step has asked for more than there are: then its micro-steps are done."""

    def __init__(self, batches: Iterable[Batch], stopping: Callable[[], bool]) -> None:
        self.batches, self.stopping = batches, stopping
        self.begun = 0
        self.used_up = False

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if self.begun and self.stopping():
                raise _Stopped
            self.begun += 1
            yield batch
        self.used_up = True


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()  # autograd's graphs may be in reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back()


def attempt(
    state: TrainState, batches: Iterable[Batch], step: Callable[[Iterable[Batch]], StepResult],
    failed: Callable[[BaseException, int], None] = lambda error, begun: None,
    stopping: Callable[[], bool] = lambda: False,
) -> StepResult | Failure | NotCompiled:  # fmt: skip
    """One optimizer step, or why there is none: after all but 'optimizer' everything is as before the step.

    'micro_step', 'optimizer': where memory ran out. 'stopped': `stopping` said so between two micro-steps. `failed` is
    told of a lack of memory: the exception, which it must not keep, and how many micro-steps had begun.
    """
    generators, watched = Generators.now(state.device), _Watched(batches, stopping)
    outcome: Failure | NotCompiled = "micro_step"
    try:
        return step(watched)
    except _Stopped:
        outcome = "stopped"
    except Exception as error:
        if (reason := not_compiled(error)) is not None and not watched.used_up:
            outcome = reason  # also where memory ran out while kernels were tried
        elif is_out_of_memory(error):
            failed(error, watched.begun)
        else:
            raise
    # Here the exception is gone, and with it the frames that held activations.
    if watched.used_up:
        return "optimizer"
    state.optimizer.zero_grad(set_to_none=True)
    if state.masters:
        state.masters.drop_gradients()
    free_memory(state.device)
    generators.restore(state.device)
    return outcome


def use_split(state: TrainState, config: RunConfig, *, compiled: bool) -> None:
    """Let a state carry out its steps as `config` says; what was compiled for other sizes is dropped."""
    state.config = config
    if compiled:  # each size is compiled for itself, and Dynamo keeps eight of them at most
        torch.compiler.reset()
        free_memory(state.device)
