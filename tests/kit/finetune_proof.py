"""Fine-tuning traces beside the real thing: the same run on fake CPU tensors and on real ones.

A CPU has the allocator's calls of every tensor, so a trace can be compared with it to the byte. What a CPU does and a
card does not (see allocated.sizes) is taken off the real side.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.profiler import ProfilerActivity, profile

from foretrain.config.finetune.options import FineTune
from foretrain.model.allocated import OF_TWO_DTYPES, peaks_of
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.finetune import standins
from foretrain.predict.trace.finetune.drive import Run, loop_of, quiet
from foretrain.predict.trace.finetune.inputs import inputs_of
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.self_test import CPU, Truth
from foretrain.predict.trace.session import tracing
from foretrain.predict.trace.tracer import Tracer


@contextmanager
def fresh() -> Iterator[None]:
    """Within it accelerate knows of no earlier run, and 4-bit weights stay as they are in every processor's kernels."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    gc.collect()  # what an earlier run left in cycles would be freed while this one is measured
    modules: Any = sys.modules.get("bitsandbytes.nn.modules")
    with Patches() as patches, quiet():
        patches.set_everywhere((modules,), "has_avx512bf16", lambda: False)
        patches.set_everywhere((sys.modules.get("bitsandbytes.functional"),), "name2qmap", {})  # of an earlier run
        yield


def traced_on_cpu(config: dict[str, Any], tune: FineTune) -> Trace:
    inputs = inputs_of(config, tune)
    with fresh(), tracing(None, compiled=False) as session, standins.stood_in(session.tracer, card=False):
        Run(config, tune, CPU, session.tracer, session.names, inputs=inputs).go()
    return session.tracer.record.finish()


def real_peaks(config: dict[str, Any], tune: FineTune) -> tuple[int, int]:
    inputs = inputs_of(config, tune)
    tracer = Tracer("cpu")  # never entered: it only takes the calls that mark phases
    with fresh(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        Run(config, tune, CPU, tracer, Names(tracer), inputs=inputs).go()
    return peaks_of(found, OF_TWO_DTYPES)


def compare(config: dict[str, Any], tune: FineTune) -> Truth:
    loop_of(tune)  # imported before anything is traced
    traced = max(peak for peak, _ in traced_on_cpu(config, tune).peaks().values())
    everything, tensors = real_peaks(config, tune)
    return Truth(traced, tensors, everything)
