"""`foretrain.trace`: the memory of any training code on a card that is not there.

def train(on):                                   # runs once, on fake tensors of the card
    model = Net().to(on.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        on.phase(f"step {step}")
        loss = model(torch.empty(64, 784, device=on.device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

found = foretrain.trace(train, gpu="RTX 4070")
found.peak_allocated_bytes, found.fits(10 << 30)
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from foretrain.hardware import Gpu, find
from foretrain.predict.allocator_settings import Settings
from foretrain.predict.exact import compiled as inductor
from foretrain.predict.exact import drive, kernels, standin
from foretrain.predict.exact.guard import StandInError
from foretrain.predict.exact.record import Trace
from foretrain.predict.exact.replay import Replay, replay, smallest_limit_bytes
from foretrain.predict.exact.tracer import Tracer

WHY = {
    UnsupportedOperatorException: "torch has no fake kernel for it; another variant may have one (foreach for fused)",
    DataDependentOutputException: "its result depends on values, which fake tensors have not",
    DynamicOutputShapeException: "the shape of its result depends on values, which fake tensors have not",
}


@dataclass(frozen=True)
class Tracing:
    """What the traced code is given: the device to work on, and words for what it does."""

    device: torch.device
    tracer: Tracer

    def phase(self, name: str) -> None:
        """What follows is this phase; peaks are told by phase."""
        self.tracer.enter(name)

    def tag(self, tensor: Tensor, category: str, name: str = "") -> None:
        """Say what a tensor is; weights, gradients and optimizer states are known already."""
        self.tracer.tag(tensor, category, name)


@dataclass(frozen=True)
class Traced:
    """A finished trace with its replays. Bytes."""

    trace: Trace
    gpu: Gpu

    def replay(self, limit_bytes: int | None = None, settings: Settings | None = None) -> Replay:
        """Through the allocator, under a limit of reserved bytes or none."""
        return replay(self.trace, settings, limit_bytes, physical=True)

    @property
    def peak_allocated_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated would say."""
        return self.replay().peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """What torch.cuda.max_memory_reserved would say with all memory there is."""
        return self.replay().peak_reserved_bytes

    @property
    def smallest_limit_bytes(self) -> int:
        """The least reserved memory under which it lives."""
        return smallest_limit_bytes(self.trace, physical=True)

    def fits(self, limit_bytes: int, settings: Settings | None = None) -> bool:
        """Whether it lives with so many bytes for the allocator, the CUDA context not included."""
        return self.replay(limit_bytes, settings).survives


def trace(
    code: Callable[[Tracing], object], gpu: str | Gpu = "RTX 4070", *, compile: bool = False, pads: bool = False
) -> Traced:
    """Run training code once on fake tensors of a card and record every storage.

    `compile`: torch.compile inside the code runs Inductor for the card, kernels left out. `pads`: what to take
    pad_mm's measurement to say. The code must make its tensors on `device`, and read no values: .item() gives 1.

    It changes this process for good: torch.cuda stays unusable, so trace in a process that does not train.
    Raises guard.StandInError where this torch cannot be made to stand in for the card, or has already used one.
    """
    if torch.cuda.is_initialized():
        raise StandInError("this process has used CUDA; trace in a fresh one")
    card = find(gpu) if isinstance(gpu, str) else gpu
    with standin.stand_in(card) as there, contextlib.ExitStack() as stack:
        Tracer.calibrate("cuda")
        tracer = Tracer("cuda", kernels.in_kernels(there.card))
        if compile:
            stack.enter_context(inductor.compiling(there.card, tracer, pads=pads))
        names = stack.enter_context(drive.named(tracer, compiled=compile))
        stack.enter_context(tracer)
        try:
            code(Tracing(torch.device("cuda"), tracer))
        except (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException) as error:
            raise StandInError(f"{error.args[0]} cannot be traced: {WHY[type(error)]}") from None
    record = tracer.record.finish(weight_shapes=frozenset(names.weight_shapes))
    record.facts = {
        "torch": torch.__version__, "gpu": card.name, "attention": sorted(there.attention),
        "matmul_dtypes": dict(tracer.matmul_dtypes),
    }  # fmt: skip
    return Traced(record, card)
