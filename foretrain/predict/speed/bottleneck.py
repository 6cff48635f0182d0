"""What the time of a step goes to: arithmetic, moving memory, or starting kernels."""

from typing import Literal

from foretrain.base.records import Record
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.parts import step_load
from foretrain.predict.speed.roofline import roofline
from foretrain.predict.speed.time import known_rates, way_of

Limit = Literal["arithmetic", "bandwidth", "launches"]


class Bottleneck(Record):
    """What limits the speed of a step, and the share of the step that this takes."""

    limit: Limit
    share: float


def bottleneck(spec: StepSpec) -> Bottleneck | None:
    """What a step's time mostly goes to; None where the device's peak or bandwidth is not known.

    Arithmetic: operations beyond the roof's ridge. Bandwidth: the others, which only move bytes. Launches: the kernels
    of a micro-batch are done before Python has started the next ones.
    """
    roof = roofline(spec)
    if roof is None:
        return None
    way = way_of(spec)
    rates = known_rates(way)
    assert rates is not None  # as the roof is known
    load = step_load(way, rates)
    working_s, starting_s = load.work_s, load.host_s - (0.0 if spec.cuda else rates.python_s)
    if starting_s > working_s:
        whole_s = starting_s if spec.cuda else starting_s + working_s
        return Bottleneck(limit="launches", share=starting_s / whole_s)
    arithmetic = sum(point.share for point in roof.points if point.flops_per_byte >= roof.ridge_flops_per_byte)
    limit: Limit = "arithmetic" if arithmetic >= 0.5 else "bandwidth"
    return Bottleneck(limit=limit, share=arithmetic if limit == "arithmetic" else 1 - arithmetic)
