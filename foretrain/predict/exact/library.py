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
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from foretrain.hardware import Gpu, find
from foretrain.predict.allocator_settings import Settings
from foretrain.predict.exact.fake_card import Card, Memory
from foretrain.predict.exact.forked import CAN_FORK, in_child
from foretrain.predict.exact.guard import StandInError
from foretrain.predict.exact.record import Trace
from foretrain.predict.exact.replay import Replay, smallest_limit_bytes
from foretrain.predict.exact.replay import replay as replayed
from foretrain.predict.exact.session import tracing
from foretrain.predict.exact.tracer import Tracer
from foretrain.predict.exact.values import place_now, raised_at
from foretrain.units import format_bytes

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


@dataclass(frozen=True)
class Traced:
    """A finished trace with its replays. Bytes. `notes` say what it leaves out, a sentence each.

    Where only the card knows what something takes, this is the lower end and `high` the same code with the upper end.
    """

    trace: Trace
    gpu: Gpu
    notes: tuple[str, ...] = ()
    high: "Traced | None" = None

    def __repr__(self) -> str:
        return f"<trace on {self.gpu.name}: {format_bytes(self.peak_allocated_bytes)} allocated at the peak>"

    def __str__(self) -> str:
        found = self.replay()
        high = self.high or self
        most = high.replay()
        ends = {phase.phase: phase.allocated_bytes for phase in most.phases}
        peaks = [f"  {p.phase:<24} {_range(p.allocated_bytes, ends.get(p.phase, 0)):>12}" for p in found.phases]
        lines = (
            f"Traced on {self.gpu.name}: {_range(found.peak_allocated_bytes, most.peak_allocated_bytes)} allocated, "
            f"{_range(found.peak_reserved_bytes, most.peak_reserved_bytes)} reserved at the peak; "
            f"runs with {_range(self.smallest_limit_bytes, high.smallest_limit_bytes)} reserved or more",
            *peaks,
            *(f"Note: {note}" for note in self.notes),
        )
        return "\n".join(lines)

    def replay(self, limit_bytes: int | None = None, settings: Settings | None = None) -> Replay:
        """Through the allocator, under a limit of reserved bytes or none."""
        return replayed(self.trace, settings, limit_bytes, physical=True)

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
        """Whether it lives with so many bytes for the allocator, the CUDA context not included; at the upper end."""
        return (self.high or self).replay(limit_bytes, settings).survives


def _range(low: int, high: int) -> str:
    """5.2 GiB, or 5.2 GiB to 5.9 GiB."""
    return " to ".join(dict.fromkeys((format_bytes(low), format_bytes(high))))


@contextlib.contextmanager
def _in_one_sentence() -> Iterator[list[Tracer]]:
    """What the code cannot do on fake tensors, as a StandInError that says so; its own errors stay as they are.

    The list is for the tracer, once it is there.
    """
    seen: list[Tracer] = []
    try:
        yield seen
    except tuple(WHY) as error:
        op, advice = str(error.args[0]), ""
        if any(tracer.sparse for tracer in seen):
            advice = ", nor for sparse tensors at all: trace with sparse=False"
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


def _card(gpu: str | Gpu) -> Gpu:
    if isinstance(gpu, Gpu):
        card = gpu
    else:
        kind: Any = gpu.strip().lower()
        card = Gpu(name=gpu, kind=kind) if kind in ("cpu", "mps") else find(gpu)
    if card.kind != "cuda":
        raise StandInError(f"{card.name} is not a CUDA card, and a trace is of one: gpu='RTX 4070', for example")
    return card


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
    """Run training code once on fake tensors of a card and record every storage.

    `compile`: torch.compile inside the code runs Inductor for the card, kernels left out. `pads`: what to take
    pad_mm's measurement to say. The code must make its model and tensors itself, on `device` (torch.cuda says that it
    is available), and learns no values: .item() gives 1.

    The code runs in a forked child, so that this process, a notebook for one, can train afterwards; variables that the
    code sets are lost. `in_process`: run it here instead, as where no fork is; torch.cuda then stays unusable.
    Where it meets something whose size only the card knows, it runs a second time with the most of it (`high`).
    Raises guard.StandInError where this torch cannot be made to stand in for the card, or has already used one.
    """
    if torch.cuda.is_initialized():
        raise StandInError("this process has used CUDA; trace in a fresh one")
    card = _card(gpu)

    def run(upper: bool) -> tuple[Traced, bool]:
        if in_process or not CAN_FORK:
            return _traced(code, card, compile, pads, upper)
        return in_child(lambda: _traced(code, card, compile, pads, upper))

    found, ranged = run(upper=False)
    return replace(found, high=run(upper=True)[0]) if ranged else found


def _traced(
    code: Callable[[Tracing], object], card: Gpu, compile: bool, pads: bool, upper: bool
) -> tuple[Traced, bool]:
    """The trace, in this process, and whether it met something that has an upper end."""
    with _in_one_sentence() as seen, tracing(card, compiled=compile, pads=pads, upper=upper) as session:
        there, tracer = session.there, session.tracer
        assert there is not None
        seen.append(tracer)
        there.memory.at_reset = lambda: tracer.enter(f"since {place_now()}")
        code(Tracing(torch.device("cuda"), tracer, there.memory))
    if not tracer.record.sizes:
        raise StandInError(f"the code put nothing on the {card.name}: make its tensors on `device`, which is cuda")
    record = tracer.record.finish(weight_shapes=frozenset(session.names.weight_shapes))
    record.facts = {
        "torch": torch.__version__, "gpu": card.name, "attention": sorted(there.attention.seen),
        "matmul_dtypes": dict(tracer.matmul_dtypes),
    }  # fmt: skip
    return Traced(record, card, _notes(tracer, there.notes)), bool(tracer.ranges)
