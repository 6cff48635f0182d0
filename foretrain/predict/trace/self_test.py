"""Is a trace the truth? On the CPU the same run can be traced on fake tensors and done on real ones.

`compare` does both for one config; the benchmark runs it over many, and a worker runs it once for a torch that it
does not know, before it answers anything.
"""

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype
from foretrain.predict.trace import drive
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.session import tracing
from foretrain.predict.trace.tracer import Tracer

CPU = torch.device("cpu")
KERNELS_WITH_SCRATCH = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """Peak of the sum of tensors in bytes: as traced, and as the real allocator had it.

    `real_bytes` is without the scratch of oneDNN and MKL inside a matrix product, which a card does not have;
    `real_with_scratch_bytes` is everything.
    """

    traced_bytes: int
    real_bytes: int
    real_with_scratch_bytes: int

    @property
    def error(self) -> float:
        """Signed: traced over real, less one."""
        return self.traced_bytes / self.real_bytes - 1


def traced_on_cpu(config: RunConfig, dtype: Dtype, step: str, *, compiled: bool) -> Trace:
    """The trace of a run on fake CPU tensors."""
    with tracing(None, compiled=compiled) as session:
        tracer, names = session.tracer, session.names
        run = drive.Job(config, CPU, dtype, compiled, tracer, names)
        drive.RUNS[step](run)
        shapes = frozenset(names.weight_shapes)
    return tracer.record.finish(logits=run.logits(), weight_shapes=shapes)


def real_peaks(config: RunConfig, dtype: Dtype, step: str, *, compiled: bool) -> tuple[int, int]:
    """The same run for real: the highest sum of the CPU allocator's blocks, with and without kernels' scratch.

    A compiled run is done twice and the second is measured, as compiling allocates too.
    """
    torch._dynamo.reset()
    gc.collect()  # what an earlier run left in cycles would be freed while this one is measured
    tracer = Tracer("cpu")  # never entered: it only takes the calls that mark phases
    for _ in range(1 if compiled else 0):
        with drive.named(tracer, compiled=compiled) as names:
            drive.RUNS[step](drive.Job(config, CPU, dtype, compiled, tracer, names))
    with (
        drive.named(tracer, compiled=compiled) as names,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        drive.RUNS[step](drive.Job(config, CPU, dtype, compiled, tracer, names))
    return peaks_of(run)


def peaks_of(run: profile) -> tuple[int, int]:
    """(peak of all blocks, peak without what matrix kernels take for themselves and give back before they return)."""
    everything, tensors = sizes(run)
    return _highest(everything), _highest(tensors)


def sizes(run: profile) -> tuple[list[int], list[int]]:
    """(bytes of all that was allocated, and below 0 of what was freed, in order; the same without kernels' scratch)."""
    events: list[tuple[int, int, int, Any]] = []  # time, signed size, address, the op that it happened in
    stack: list[tuple[Any, Any]] = [(n, None) for n in run.profiler.kineto_results.experimental_event_tree()]  # type: ignore[union-attr]
    while stack:
        node, op = stack.pop()
        if node.tag == _EventType.TorchOp and op is None and node.name in KERNELS_WITH_SCRATCH:
            op = node
        stack.extend((child, op) for child in node.children)
        if node.tag == _EventType.Allocation:
            fields: Any = node.extra_fields
            if fields.device.type == "cpu":
                events.append((node.start_time_ns, fields.alloc_size, fields.ptr, op))
    events.sort(key=lambda event: event[0])
    born: dict[int, tuple[int, Any]] = {}
    scratch: set[int] = set()
    for i, (_, size, address, op) in enumerate(events):
        if size > 0:
            born[address] = (i, op)
        elif address in born:
            start, inside = born.pop(address)
            if inside is not None and inside is op:
                scratch |= {start, i}
    return [event[1] for event in events], [event[1] for i, event in enumerate(events) if i not in scratch]


def _highest(sizes: Iterable[int]) -> int:
    return max(accumulate(sizes), default=0)


def compare(config: RunConfig, dtype: Dtype, step: str, *, compiled: bool) -> Truth:
    """Trace a run and do it."""
    trace = traced_on_cpu(config, dtype, step, compiled=compiled)
    traced = max(peak for peak, _ in trace.peaks().values())
    everything, tensors = real_peaks(config, dtype, step, compiled=compiled)
    return Truth(traced, tensors, everything)
