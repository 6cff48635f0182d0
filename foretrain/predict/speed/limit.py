"""The limit of a step: a roofline (Williams, Waterman and Patterson 2009) of this device's measured peaks over the
operations of a compiled step with fused attention. FLOPs are causal, with recomputation."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, get_args

from foretrain.base.records import Record
from foretrain.hardware.calibration import Bandwidth, Calibration, KernelTime, Peaks, ProductPeak, best_of
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import Operation
from foretrain.predict.speed.ops import step as step_operations
from foretrain.predict.speed.rates import COLD, MeasuredRates, Rates, kernel_flops
from foretrain.predict.speed.time import known_rates, micro_batch_run, step_load


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
    peak_flop_per_s: float
    bandwidth_bytes_per_s: float
    source: str
    points: tuple[RooflinePoint, ...]
    other_share: float

    @property
    def ridge_flops_per_byte(self) -> float:
        return self.peak_flop_per_s / self.bandwidth_bytes_per_s


def roofline(spec: StepSpec) -> Roofline | None:
    way, gpu = micro_batch_run(spec), spec.gpu
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
    limit: Limit
    share: float


def bottleneck(spec: StepSpec) -> Bottleneck | None:
    """Return where most of a step's time goes; None where the device's peak or bandwidth is unknown. Arithmetic:
    operations beyond the roof's ridge. Launches: Python is slower than the kernels of a micro-batch."""
    roof = roofline(spec)
    if roof is None:
        return None
    way = micro_batch_run(spec)
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


Group = Literal["forward", "input_gradient", "weight_gradient", "attention", "pointwise", "loss", "optimizer"]
GROUPS: tuple[Group, ...] = get_args(Group)
OF_KIND: dict[str, Group] = {
    "matmul": "forward", "matmul_input": "input_gradient", "matmul_weight": "weight_gradient",
    "attention": "attention", "attention_backward": "attention", "attention_bmm": "attention",
    "attention_bmm_backward": "attention",
}  # fmt: skip
IN_PLACE = frozenset({"adamw", "clip", "accumulate"})
# One pass over all weights or gradients: the first of them have left the cache before the last are touched.
PASSES = COLD | {"cast"}
ELSEWHERE = frozenset({"transfer", "host"})  # between card and computer: not measured


class OperationLimit(Record):
    """All runs of one operation in a step. `bound`: the larger part of its time at the limit."""

    group: Group
    name: str
    kind: str
    part: str
    runs: int
    shape: tuple[int, ...]
    total_flops: int
    total_bytes: int
    limit_s: float
    bound: Literal["compute", "memory"]


class GroupLimit(Record):
    group: Group
    total_flops: int
    total_bytes: int
    limit_s: float
    kernels_s: float | None = None


class StepLimit(Record):
    dtype: str
    limit_s: float
    groups: tuple[GroupLimit, ...]
    operations: tuple[OperationLimit, ...]


def group_of(op: Operation) -> Group:
    if op.part in ("optimizer", "accumulate"):
        return "optimizer"
    return OF_KIND.get(op.kind) or ("loss" if op.name == "loss" else "pointwise")


def peaks_of(calibration: Calibration) -> Peaks:
    matmuls, bandwidths = list[ProductPeak](), list[Bandwidth]()
    for kernel in calibration.kernels:
        if len(kernel.shape) == 1:
            access: Any = "in_place" if kernel.kind in IN_PLACE else "copy"
            rate = kernel.shape[0] / kernel.time_s
            bandwidths.append(Bandwidth(access=access, moved_bytes=kernel.shape[0], bytes_per_s=rate))
        else:
            matmuls.append(_product(kernel))
    each_s = calibration.launch_s
    found = Peaks(matmuls=tuple(matmuls), bandwidths=tuple(bandwidths), launch_s=each_s, autograd_launch_s=2 * each_s)
    return best_of(calibration.peaks, found) if calibration.peaks else best_of(found)


def _product(kernel: KernelTime) -> ProductPeak:
    kind: Any = "attention" if kernel.kind.startswith("attention") else kernel.kind
    rate = kernel_flops(kernel) / kernel.time_s
    return ProductPeak(kind=kind, dtype=kernel.dtype, shape=kernel.shape, flop_per_s=rate)


def limit_of(spec: StepSpec, peaks: Peaks) -> StepLimit | None:
    """Return the limit of this step in its dtype; None where some peak was not measured."""
    fused = spec.config.model_copy(update={"attention": "sdpa"})
    way = micro_batch_run(StepSpec.of(fused, spec.gpu, spec.step, dtype=spec.dtype, compiled=True))
    operations = step_operations(way)
    if any(op.arithmetic != "dtype" or op.kind in ELSEWHERE for op in operations):
        return None
    if peaks.flop_per_s(spec.dtype) is None or peaks.memory_bytes_per_s() is None:
        return None
    return _limit(operations, peaks, spec.dtype)


def _limit(operations: Iterable[Operation], peaks: Peaks, dtype: str) -> StepLimit:
    operations = list(operations)
    passes: dict[tuple[str, str], int] = defaultdict(int)
    for op in operations:
        passes[op.kind, op.part] += op.runs * op.nbytes
    found = tuple(
        _operation(op, peaks, passes[op.kind, op.part] if op.kind in PASSES else op.nbytes) for op in operations
    )
    groups = []
    for group in GROUPS:
        own = [each for each in found if each.group == group]
        groups.append(
            GroupLimit(
                group=group, total_flops=sum(each.total_flops for each in own),
                total_bytes=sum(each.total_bytes for each in own), limit_s=math.fsum(each.limit_s for each in own),
            )
        )  # fmt: skip
    total_s = math.fsum(group.limit_s for group in groups)
    return StepLimit(dtype=dtype, limit_s=total_s, groups=tuple(groups), operations=found)


def _operation(op: Operation, peaks: Peaks, set_bytes: int) -> OperationLimit:
    """`set_bytes`: moved before anything of it comes again."""
    peak = peaks.flop_per_s(op.dtype, attention=op.kind.startswith("attention")) if op.flops else None
    bandwidth = peaks.bytes_per_s(set_bytes, in_place=op.kind in IN_PLACE)
    assert bandwidth
    compute_s = op.causal_flops / peak if peak else 0.0
    memory_s = op.nbytes / bandwidth
    return OperationLimit(
        group=group_of(op), name=op.name, kind=op.kind, part=op.part, runs=op.runs, shape=op.shape,
        total_flops=op.runs * op.causal_flops, total_bytes=op.runs * op.nbytes,
        limit_s=op.runs * max(compute_s, memory_s), bound="compute" if compute_s >= memory_s else "memory",
    )  # fmt: skip


def with_kernels(limit: StepLimit, spec: StepSpec) -> StepLimit:
    way = micro_batch_run(spec)
    rates = known_rates(way)
    if not isinstance(rates, MeasuredRates):
        return limit
    spent: dict[str, float] = defaultdict(float)
    for op in step_operations(way):
        spent[group_of(op)] += op.runs * rates.time_s(op)
    groups = tuple(each.model_copy(update={"kernels_s": spent[each.group]}) for each in limit.groups)
    return limit.model_copy(update={"groups": groups})
