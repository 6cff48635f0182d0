"""`foretrain.trace` in one process: the memory of any training code on a card that is not there.

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
import io
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace.card.torch_cuda import Card, Memory
from foretrain.predict.trace.forked import CAN_FORK, in_child
from foretrain.predict.trace.kernels.values import place_now, raised_at
from foretrain.predict.trace.session import tracing
from foretrain.predict.trace.traced import StandInError, Traced, call_with, card_of
from foretrain.predict.trace.tracer import Tracer

WHY = {
    UnsupportedOperatorException: "torch has no fake kernel for it",
    DataDependentOutputException: "its result depends on values, which fake tensors have not",
    DynamicOutputShapeException: "the shape of its result depends on values, which fake tensors have not",
}
# What torch says where fake tensors, or a card that is not there, are met by surprise; and what to do about it.
SENTENCES = {
    "Please convert all Tensors to FakeTensors": "a tensor that was made outside the traced function came into it: "
    "make models, optimizers and tensors inside, where they are fake and take no memory",
    "stance is 'fail_on_recompile'": "the code calls torch.compile: give compile=True to foretrain.trace",
    "DataLoader worker process": "a DataLoader's workers are other processes, without fake tensors: give num_workers=0",
    "Autograd-and-Fork": "this process has computed gradients where PyTorch sees a card, after which a forked child "
    "cannot: trace first, or in a fresh process, or give in_process=True",
    "shape_env must not be None": "the shapes of nested tensors are values, which fake tensors have not: trace the "
    "batch padded to its longest sequence, which takes more memory",
    "No module named 'triton'": "Inductor writes this code with Triton itself (a cumsum or cumprod, as a rule), which "
    "is not installed: keep that line out of torch.compile, as by torch.compiler.disable",
    "Target values should be in": "nn.AdaptiveLogSoftmaxWithLoss sorts words by their values, which fake tensors have "
    "not: trace F.nll_loss(layer.log_prob(x), target) in its place, which takes more memory",
    "not compiled with CUDA|NVIDIA driver|driver version|ATen_cuda|_cuda_|CUDA support": "the code asked CUDA for what "
    "only a real card answers",
}


@dataclass(frozen=True)
class Tracing:
    """What the traced code is given: the device to work on, and words for what it does."""

    device: torch.device
    tracer: Tracer
    memory: Memory = field(default_factory=lambda: Memory(Card("", (0, 0), 1, 0)))

    def phase(self, name: str) -> None:
        """What follows is this phase; peaks are told by phase. Without any, each reset_peak_memory_stats begins one."""
        self.memory.at_reset = lambda: None
        self.tracer.enter(name)

    def tag(self, tensor: Tensor, category: str, name: str = "") -> None:
        """Say what a tensor is; weights, gradients and optimizer states are known already."""
        self.tracer.tag(tensor, category, name)


@contextlib.contextmanager
def in_one_sentence() -> Iterator[list[Tracer]]:
    """What the code cannot do on fake tensors, as a StandInError that says so; its own errors stay as they are.

    The list is for the tracer, once it is there.
    """
    seen: list[Tracer] = []
    try:
        yield seen
    except tuple(WHY) as error:
        op, advice = str(error.args[0]), ""
        if "_ctc_loss" in op:
            advice = "; trace -log_probs.mean() in its place, to which the loss adds two tensors of batch x length of "
            advice += "log_probs x (2 x length of the longest target + 1)"
        elif "nested" in op:
            advice = "; a batch padded to its longest sequence can be traced, and takes more memory"
        elif "sparse" in op or any(tracer.sparse for tracer in seen):
            advice = "; dense tensors can be traced, and take more memory: to_dense(), nn.Embedding without sparse=True"
        elif "._fused_" in op:
            advice = "; the optimizer's foreach=True can be traced"
        place = raised_at(error)
        where = f", at {place}" if place else ""
        raise StandInError(f"{op} cannot be traced: {WHY[type(error)]}{advice}{where}") from None
    except (AssertionError, RuntimeError, AttributeError) as error:
        said = str(error)
        for pattern, sentence in SENTENCES.items():
            if re.search(pattern, said):
                raise StandInError(f"{sentence} ({said.splitlines()[0][:120]})") from error
        raise


def _notes(tracer: Tracer, notes: set[str]) -> tuple[str, ...]:
    """What the answer leaves out, as far as the code came by it."""
    found = {*notes, *tracer.values.notes(), *tracer.ranges}
    if tracer.sparse:
        found.add("sparse tensors are taken to be empty: their indices and values come on top")
    if count := sum(tracer.elsewhere.values()):
        found.add(f"{count} matrix products ran on CPU tensors, which take nothing on the card")
    return tuple(sorted(found))


def trace(
    code: Callable[[Tracing], object],
    gpu: str | Gpu = "RTX 4070",
    *,
    compile: bool = False,
    pads: bool = False,
    in_process: bool = False,
) -> Traced:
    """What predict/trace/elsewhere.py's `trace` says, in this process or a child of it."""
    if torch.cuda.is_initialized():
        raise StandInError("this process has used CUDA; trace in a fresh one")
    card = card_of(gpu)

    def traced(upper: bool) -> tuple[Traced, bool]:
        with contextlib.ExitStack() as stack:
            if upper:  # what the code shows was shown before
                stack.callback(logging.disable, logging.root.manager.disable)
                logging.disable(logging.CRITICAL)
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            return _traced(code, card, compile, pads, upper)

    def run(upper: bool) -> tuple[Traced, bool]:
        return traced(upper) if in_process or not CAN_FORK else in_child(lambda: traced(upper))

    found, ranged = run(upper=False)
    return replace(found, high=run(upper=True)[0]) if ranged else found


def _traced(
    code: Callable[[Tracing], object], card: Gpu, compile: bool, pads: bool, upper: bool
) -> tuple[Traced, bool]:
    """The trace, in this process, and whether it met something that has an upper end."""
    with in_one_sentence() as seen, tracing(card, compiled=compile, pads=pads, upper=upper) as session:
        there, tracer = session.there, session.tracer
        assert there is not None
        seen.append(tracer)
        there.memory.at_reset = lambda: tracer.enter(f"since {place_now()}")
        call_with(code, Tracing(torch.device("cuda"), tracer, there.memory))
    if not tracer.record.sizes:
        raise StandInError(f"the code put nothing on the {card.name}: make its tensors on `device`, which is cuda")
    record = tracer.record.finish(weight_shapes=frozenset(session.names.weight_shapes))
    record.facts = {
        "torch": torch.__version__, "gpu": card.name, "attention": sorted(there.attention.seen),
        "matmul_dtypes": dict(tracer.matmul_dtypes), **session.marks.facts(),
    }  # fmt: skip
    bound = "at_least" if tracer.values.bounded else "exact"
    return Traced(record, card, _notes(tracer, there.notes), bound=bound), bool(tracer.ranges)
