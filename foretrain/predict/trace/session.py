"""What every trace needs: a card (or the CPU), a tracer, Inductor where wanted, and the hooks that give names."""

import contextlib
import io
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_attention
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx import Graph, GraphModule

from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace import drive
from foretrain.predict.trace.card import standin
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.standin import StandIn
from foretrain.predict.trace.card.torch_cuda import Card, Memory
from foretrain.predict.trace.forked import CAN_FORK, in_child
from foretrain.predict.trace.interpreter import Norm
from foretrain.predict.trace.kernels import reductions, values, workspaces
from foretrain.predict.trace.kernels import temporaries as kernels
from foretrain.predict.trace.kernels.values import place_now, raised_at
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.quick import faster_fake_ops
from foretrain.predict.trace.traced import StandInError, Traced, call_with, card_of
from foretrain.predict.trace.tracer import Tracer

WHOLE = slice(None)
NARROW = (torch.float16, torch.bfloat16)


class Marks:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.norms: list[Norm] = []
        self.sliced_bytes = 0
        self.compiled_norms = 0  # calls under autocast, where a graph has one of 16 bits

    def patch(self, patches: Patches) -> None:
        norm, take = F.rms_norm, Tensor.__getitem__

        def rms_norm(
            input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
        ) -> Any:
            first = len(self.tracer.record.sizes)
            out = norm(input, normalized_shape, weight, eps)
            kind = "none" if weight is None else "same" if weight.dtype == input.dtype else "other"
            if out.requires_grad:
                self.norms.append(
                    Norm(
                        first, len(self.tracer.record.sizes), math.prod(input.shape), input.dtype in NARROW, kind,
                        torch.is_autocast_enabled("cuda"),
                    )
                )  # fmt: skip
            return out

        def getitem(tensor: Tensor, index: Any) -> Any:
            if tensor.requires_grad and torch.is_grad_enabled() and _takes_a_whole_dimension(index):
                nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
                self.sliced_bytes = max(self.sliced_bytes, nbytes)
            return take(tensor, index)

        patches.set(F, "rms_norm", rms_norm)
        # Of Tensor itself it would stay a sequence for CPython, which torch.tensor([tensor]) then takes apart.
        patches.set(FakeTensor, "__getitem__", getitem)

    def patch_compiler(self, patches: Patches, inductor: Any) -> None:
        """Note in each graph that Inductor gets the calls of rms_norm which autocast casts."""
        compile_fx = inductor.compile_fx

        def seen(model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, GraphModule):
                for graph in (each.graph for each in model.modules() if isinstance(each, GraphModule)):
                    self._count_norms(graph)
            return compile_fx(model, *args, **kwargs)

        patches.set(inductor, "compile_fx", seen)

    def _count_norms(self, graph: Graph) -> None:
        autocast, count, narrow = [torch.is_autocast_enabled("cuda")], 0, False
        for node in graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast":
                autocast.append(node.args[2])
            elif name == "_exit_autocast":
                autocast.pop()
            elif name == "rms_norm" and autocast[-1]:
                value = node.args[0].meta.get("example_value")
                count, narrow = count + 1, narrow or (isinstance(value, Tensor) and value.dtype in NARROW)
        self.compiled_norms += count if narrow else 0

    def facts(self) -> dict[str, Any]:
        """Return the facts of a trace; nothing where the step meets no difference."""
        norms = {"rms_norms": [list(norm) for norm in self.norms]} if self.norms else {}
        norms |= {"compiled_norms": self.compiled_norms} if self.compiled_norms else {}
        return norms | ({"whole_slices_bytes": self.sliced_bytes} if self.sliced_bytes else {})


def _takes_a_whole_dimension(index: Any) -> bool:
    return any(isinstance(part, slice) and part == WHOLE for part in (index if isinstance(index, tuple) else (index,)))


@dataclass(frozen=True)
class Session:
    tracer: Tracer
    names: Names
    there: StandIn | None
    marks: Marks


@contextlib.contextmanager
def tracing(gpu: Gpu | None, *, compiled: bool, pads: bool = False, upper: bool = False) -> Iterator[Session]:
    """Record every storage of a card within, or of fake CPU tensors without one. `pads`: the assumed result of pad_mm's
    measurements; `upper`: the most of what only the card knows. Raises guard.StandInError."""
    with contextlib.ExitStack() as stack:
        there = None if gpu is None else stack.enter_context(standin.stand_in(gpu))
        if there is None:
            stack.enter_context(standin.fake_cpu())
        device = "cpu" if there is None else "cuda"
        Tracer.calibrate(device)
        tracer = Tracer(device, None if there is None else kernels.in_kernels(there.card), upper=upper)
        patches, marks = stack.enter_context(Patches()), Marks(tracer)
        values.patch(patches, tracer.values)
        workspaces.patch_convolutions(patches)
        switch = torch.set_autocast_enabled

        def switched(*which: Any) -> None:
            switch(*which)
            tracer.autocast = torch.is_autocast_enabled("cuda")

        patches.set(torch, "set_autocast_enabled", switched)
        if there is not None:
            there.memory.record = tracer.record
            tracer.record.stream_now = there.memory.streams.now
            tracer.attention = there.attention
            patches.set(torch._C, "_cuda_clearCublasWorkspaces", tracer.clear_workspaces)
        if compiled:
            from foretrain.predict.trace import compiled as inductor  # it imports Inductor, which takes a second

            card, memory = (None, None) if there is None else (there.card, there.memory)
            stack.enter_context(inductor.compiling(card, tracer, pads=pads, memory=memory))
            marks.patch_compiler(patches, inductor.compile_fx)
        else:
            stack.enter_context(standin.uncompiled())
            # Dynamo, which flex_attention runs even where nothing is compiled, changes nothing of what it does.
            patches.set(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
            marks.patch(patches)
            workspaces.patch_matmuls(patches)  # Dynamo knows the real ones alone
            patches.set(torch, "ctc_loss", reductions.with_tensors(torch.ctc_loss))
        stack.enter_context(faster_fake_ops(compiled=compiled))
        names = stack.enter_context(drive.naming_allocations(tracer, compiled=compiled))
        names.before_a_root = standin.real_ways(patches, tracer.values)
        stack.enter_context(standin.watched_resizes(tracer.resized))
        stack.enter_context(tracer)
        yield Session(tracer, names, there, marks)


# `foretrain.trace` in one process. Its train(on) runs once, on fake tensors of the card: on.device, on.phase("step 0").

WHY = {
    UnsupportedOperatorException: "torch has no fake kernel for it",
    DataDependentOutputException: "its result depends on values, which fake tensors have not",
    DynamicOutputShapeException: "the shape of its result depends on values, which fake tensors have not",
}
# torch's errors about fake tensors or a missing card, and what to do about them.
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
    device: torch.device
    tracer: Tracer
    memory: Memory = field(default_factory=lambda: Memory(Card("", (0, 0), 1, 0)))

    def phase(self, name: str) -> None:
        """Begin this phase, each with its peak. Without any, each reset_peak_memory_stats begins one."""
        self.memory.at_reset = lambda: None
        self.tracer.enter(name)

    def tag(self, tensor: Tensor, category: str, name: str = "") -> None:
        """Name a tensor's category; weights, gradients and optimizer states are known already."""
        self.tracer.tag(tensor, category, name)


DENSE = "; dense tensors can be traced, and take more memory: to_dense(), nn.Embedding without sparse=True"


@contextlib.contextmanager
def in_one_sentence() -> Iterator[list[Tracer]]:
    """Raise StandInError for what the code cannot do on fake tensors; its own errors stay. The list gets the tracer."""
    seen: list[Tracer] = []
    try:
        yield seen
    except tuple(WHY) as error:
        op, advice = str(error.args[0]), ""
        if "nested" in op:
            advice = "; a batch padded to its longest sequence can be traced, and takes more memory"
        elif "sparse" in op or any(tracer.sparse for tracer in seen):
            advice = DENSE
        elif "._fused_" in op:
            advice = "; the optimizer's foreach=True can be traced"
        place = raised_at(error)
        where = f", at {place}" if place else ""
        raise StandInError(f"{op} cannot be traced: {WHY[type(error)]}{advice}{where}") from None
    except (AssertionError, RuntimeError, AttributeError) as error:
        text = str(error)
        for pattern, sentence in SENTENCES.items():
            if re.search(pattern, text):
                advice = DENSE if any(tracer.sparse for tracer in seen) else ""
                raise StandInError(f"{sentence} ({text.splitlines()[0][:120]}){advice}") from error
        raise


def _notes(tracer: Tracer, notes: set[str]) -> tuple[str, ...]:
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
    """Trace as predict/trace/elsewhere.py's `trace`, in this process or a child of it."""
    if torch.cuda.is_initialized():
        raise StandInError("this process has used CUDA; trace in a fresh one")
    card = card_of(gpu)

    def traced(upper: bool) -> tuple[Traced, bool]:
        with contextlib.ExitStack() as stack:
            if upper:  # the first run has shown the code's output
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
    """Return the trace, in this process, and whether it met something with an upper end."""
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
