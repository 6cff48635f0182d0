"""What every trace stands in: a card (or the CPU), a tracer, Inductor where wanted, and the hooks that give names."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_attention

from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace import drive
from foretrain.predict.trace.card import libraries, standin
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.standin import StandIn
from foretrain.predict.trace.kernels import convolutions, products, values
from foretrain.predict.trace.kernels import temporaries as kernels
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.quick import quick
from foretrain.predict.trace.tracer import Tracer
from foretrain.predict.trace.version_marks import Marks


@dataclass(frozen=True)
class Session:
    """A trace that runs; `there` is None on the CPU."""

    tracer: Tracer
    names: Names
    there: StandIn | None
    marks: Marks


@contextlib.contextmanager
def tracing(gpu: Gpu | None, *, compiled: bool, pads: bool = False, upper: bool = False) -> Iterator[Session]:
    """Within it every storage of a card is recorded, or of fake CPU tensors where no card is given.

    `pads`: what to take pad_mm's measurement to say. `upper`: of what only the card knows, the most.
    Raises guard.StandInError where this torch cannot stand in.
    """
    with contextlib.ExitStack() as stack:
        there = None if gpu is None else stack.enter_context(standin.stand_in(gpu))
        if there is None:
            stack.enter_context(standin.fake_cpu())
        device = "cpu" if there is None else "cuda"
        Tracer.calibrate(device)
        tracer = Tracer(device, None if there is None else kernels.in_kernels(there.card), upper=upper)
        patches, marks = stack.enter_context(Patches()), Marks(tracer)
        values.patch(patches, tracer.values)
        convolutions.patch(patches)
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
            products.patch(patches)  # Dynamo knows the real ones alone
        stack.enter_context(quick(compiled=compiled))
        names = stack.enter_context(drive.named(tracer, compiled=compiled))
        names.before_a_root = libraries.real_ways(patches, tracer.values)
        stack.enter_context(standin.watched_resizes(tracer.resized))
        stack.enter_context(tracer)
        yield Session(tracer, names, there, marks)
