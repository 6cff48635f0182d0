"""What the time of a step goes to: arithmetic, moving memory, or starting kernels."""

from typing import Literal

from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.predict.memory import StepName
from foretrain.predict.speed.rates import rates_of
from foretrain.predict.speed.roofline import roofline
from foretrain.predict.speed.step_ops import micro_batch
from foretrain.predict.speed.time import busy_s, way_of

Limit = Literal["arithmetic", "bandwidth", "launches"]


class Bottleneck(Record):
    """What limits the speed of a step, and the share of the step that this takes."""

    limit: Limit
    share: float


def bottleneck(config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, *, compiled: bool) -> Bottleneck | None:
    """What a step's time mostly goes to; None where the device's peak or bandwidth is not known.

    Arithmetic: operations beyond the roof's ridge. Bandwidth: the others, which only move bytes. Launches: the kernels
    of a micro-batch are done before Python has started the next ones.
    """
    roof = roofline(config, gpu, dtype, step, compiled=compiled)
    if roof is None:
        return None
    way = way_of(config, gpu, dtype, step, compiled, True)
    rates = rates_of(gpu, dtype, way.matmul, way.torch)
    assert rates is not None  # as the roof is known
    operations = micro_batch(way)
    starting_s = sum(op.runs for op in operations) * rates.launch_s(compiled=compiled)
    working_s = busy_s(operations, rates)
    if starting_s > working_s:
        whole_s = starting_s if way.cuda else starting_s + working_s
        return Bottleneck(limit="launches", share=starting_s / whole_s)
    arithmetic = sum(point.share for point in roof.points if point.flops_per_byte >= roof.ridge_flops_per_byte)
    limit: Limit = "arithmetic" if arithmetic >= 0.5 else "bandwidth"
    return Bottleneck(limit=limit, share=arithmetic if limit == "arithmetic" else 1 - arithmetic)
