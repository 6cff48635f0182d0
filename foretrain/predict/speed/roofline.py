"""A step's operations against the card's roof: FLOPs for each byte moved, and the FLOP/s that each is to reach.

The roof is min(dense peak, bandwidth x intensity) (Williams, Waterman and Patterson 2009, "Roofline: an insightful
visual performance model"). FLOPs are the causal ones, bytes and times those of ops.py and rates.py: what the
plan's own step time is made of. Operations without FLOPs in that count (norms, casts, the optimizer) have no place
under a roof; their share of the time is said beside it.
"""

from collections.abc import Iterable
from typing import Literal

from foretrain.base.records import Record
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import Operation
from foretrain.predict.speed.parts import step_load
from foretrain.predict.speed.rates import MeasuredRates, Rates
from foretrain.predict.speed.step_ops import step as step_operations
from foretrain.predict.speed.time import known_rates, way_of


class RooflinePoint(Record):
    """All kernels of one name, kind and part in a step. `flops_per_byte`: intensity; `share`: of the kernels' time."""

    name: str
    kind: str
    part: str
    runs: int
    total_flops: int
    total_bytes: int
    time_s: float
    flop_per_s: float
    share: float

    @property
    def flops_per_byte(self) -> float:
        return self.total_flops / self.total_bytes


class Roofline(Record):
    """The card's roof, and what stands under it, longest first. `other_share`: of operations that count no FLOPs."""

    peak_flop_per_s: float
    bandwidth_bytes_per_s: float
    source: str
    points: tuple[RooflinePoint, ...]
    other_share: float

    @property
    def ridge_flops_per_byte(self) -> float:
        """The intensity from which on the peak is the roof."""
        return self.peak_flop_per_s / self.bandwidth_bytes_per_s


def roofline(spec: StepSpec) -> Roofline | None:
    """The step's operations under the roof; None where the card's peak or bandwidth is not known."""
    way, gpu = way_of(spec), spec.gpu
    rates, bandwidth = known_rates(way), gpu.bandwidth_bytes_per_s
    peak = gpu.matmul_peak_flop_per_s(spec.matmul, spec.dtype) or gpu.peak_flop_per_s(spec.dtype)
    if rates is None or not peak or not bandwidth:
        return None
    return _under(step_operations(way), rates, peak, bandwidth)


def _under(operations: Iterable[Operation], rates: Rates, peak: float, bandwidth: float) -> Roofline:
    groups: dict[tuple[str, str, str], list[Operation]] = {}
    for op in operations:
        groups.setdefault((op.name, op.kind, op.part) if op.flops else ("", "", ""), []).append(op)
    times = {key: sum(op.runs * rates.time_s(op) for op in group) for key, group in groups.items()}
    total_s = sum(times.values()) or 1.0
    points = []
    for (name, kind, part), group in groups.items():
        time_s, flops = times[name, kind, part], sum(op.runs * op.causal_flops for op in group)
        if name and time_s > 0:
            points.append(
                RooflinePoint(
                    name=name, kind=kind, part=part, runs=sum(op.runs for op in group), total_flops=flops,
                    total_bytes=sum(op.runs * op.nbytes for op in group), time_s=time_s, flop_per_s=flops / time_s,
                    share=time_s / total_s,
                )
            )  # fmt: skip
    return Roofline(
        peak_flop_per_s=peak, bandwidth_bytes_per_s=bandwidth,
        source="calibrated" if isinstance(rates, MeasuredRates) else "estimated",
        points=tuple(sorted(points, key=lambda point: -point.time_s)),
        other_share=times.get(("", "", ""), 0.0) / total_s,
    )  # fmt: skip


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
