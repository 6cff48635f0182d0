"""The time of a step, an evaluation and the compilation: the operations of ops.py at the speeds of rates.py. An
uncalibrated machine's processor is taken as average; data loading is taken to be hidden behind the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from foretrain.base.records import Record
from foretrain.config.checks import launched
from foretrain.config.families import family_of
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.config.shape import ModelShape
from foretrain.hardware.calibration import Calibration, StepTime
from foretrain.hardware.catalogue import Gpu, MatmulMode
from foretrain.hardware.links import pinned_bytes_per_s
from foretrain.predict import software
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import (
    FUSED_LAUNCHES,
    MicroBatchRun,
    Operation,
    accumulation,
    flops,
    micro_batch,
    optimizer,
    optimizer_launches,
)
from foretrain.predict.speed.ops import step as step_operations
from foretrain.predict.speed.rates import (
    GAP_S,
    HOST_BYTES_PER_S,
    Launches,
    MeasuredRates,
    Rates,
    beside_kernels,
    busy_s,
    launches_of,
    rates_of,
)

DECIDING = named(lambda option: "speed" in option.affects)
SIZES = named(lambda option: option.reference == "near")
SAME = named(lambda option: "speed" in option.affects and option.reference == "same")
REACH = 1.0  # doublings, of each size


def step_of(config: RunConfig, dtype: str, time_s: float, threads: int, *, graphed: bool = False) -> StepTime:
    """A timed step to keep. `threads`: how many it ran on; 0 on a card. `graphed`: as one CUDA graph."""
    options: dict[str, Any] = {name: getattr(config, name) for name in DECIDING}
    options |= {"cpu_threads": threads, "cuda_graph": "on" if graphed else "off"}
    return StepTime(options=options, dtype=dtype, compiled=config.compile, time_s=time_s)


def tuned_like(found: Calibration, spec: StepSpec) -> StepTime | None:
    """The timed step that is nearest to this one, if one is near enough to correct it."""
    near = [
        (distance, step)
        for step in found.tuned
        if (step.dtype, step.compiled) == (spec.dtype, spec.compiled)
        and (distance := _distance(step, spec, found.threads)) is not None
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def _distance(step: StepTime, spec: StepSpec, threads: int) -> float | None:
    """Of the sizes, in doublings; None where it is another step."""
    config = spec.config
    for name in SAME:
        own, its = getattr(config, name), step.options.get(name, OPTIONS[name].default)
        if (name, own, its) == ("attention", "auto", "sdpa"):  # what a plan takes it for
            own = its
        if name == "cpu_threads" and its:
            own = own or threads
        if its != own:
            return None
    apart = []
    for name in SIZES:
        size = step.options.get(name)
        if not isinstance(size, int) or size < 1:
            return None
        apart.append(abs(math.log2(getattr(config, name) / size)))
    if max(apart) > REACH:
        return None
    try:
        timed = launched(step.options)
    except ValidationError:  # of another version, or damaged
        return None
    alike = [timed.checkpointed * config.n_layer == config.checkpointed * timed.n_layer]
    alike += [(timed.cuda_graph == "on") == spec.is_one_graph]
    alike += [bool(timed.loss_chunk_size) == bool(config.loss_chunk_size), bool(timed.dropout) == bool(config.dropout)]
    return sum(x * x for x in apart) if all(alike) else None


# Waits of a micro-batch for copies between card and host (model/host_memory.py). The input of a checkpointed block
# leaves the card during its block, and comes back during the block after it, whose recomputation and backward pass take
# three times as long. Gradients leave during the backward pass, and a thread of the host sums them meanwhile. Copies
# and sums that are no longer than the work beside them cost nothing.

BACKWARD = 3  # a block's recomputation and its backward pass, in forward passes


def waits_s(way: MicroBatchRun, operations: list[Operation], rates: Rates) -> float:
    if not (way.train and way.spec.cuda):
        return 0.0
    bytes_per_s = pinned_bytes_per_s(way.spec.gpu.name)
    found = 0.0
    if way.config.elements_on_host:
        bus_s = way.wide * way.config.elements_on_host / bytes_per_s
        blocks_s = busy_s([op for op in operations if op.part == "recompute"], rates)
        found += max(0.0, bus_s - blocks_s) + max(0.0, bus_s - BACKWARD * blocks_s)
    if way.config.gradient_offload:
        shape = ModelShape.of(way.config)
        bus_s = way.wide * shape.n_params / bytes_per_s
        sums_s = (4 + way.wide + 4) * shape.n_params / HOST_BYTES_PER_S
        backward_s = busy_s([op for op in operations if op.part in ("recompute", "backward")], rates)
        last_s = way.wide * max(shape.numels) / bytes_per_s  # the embedding's, when nothing is left to run beside
        found += max(0.0, max(bus_s, sums_s) - backward_s) + last_s
    return found


@dataclass(frozen=True)
class StepParts:
    micro_batches: int
    micro_batch_s: float
    sum_s: float  # of one micro-batch's gradients and those before it
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.micro_batches * self.micro_batch_s + (self.micro_batches - 1) * self.sum_s + self.optimizer_s


@dataclass(frozen=True)
class StepLoad:
    """Seconds of device and host for a micro-batch, its sum of gradients, and optimizer. `start_s`: its launching."""

    micro_batches: int
    behind: bool  # does the device run behind the host?
    work_s: float
    host_s: float
    sum_work_s: float
    sum_host_s: float
    optimizer_work_s: float
    optimizer_host_s: float
    start_s: float

    def micro_batch_s(self, work: float = 1.0, host: float = 1.0) -> float:
        work_s, host_s = work * self.work_s, host * self.host_s
        return max(work_s, host_s) if self.behind else work_s + host_s

    def parts(self, work: float = 1.0, host: float = 1.0) -> StepParts:
        work_s, host_s, alone_s = work * self.work_s, host * self.host_s, self.micro_batch_s(work, host)
        optimizer_s = work * (self.optimizer_work_s + self.start_s)
        if not self.behind:
            return StepParts(self.micro_batches, alone_s, work * self.sum_work_s, optimizer_s)
        sum_s = max(work_s + work * self.sum_work_s, host_s + host * self.sum_host_s) - alone_s
        ahead_s = self.micro_batches * max(0.0, work_s - host_s)
        optimizer_s = max(optimizer_s, host * self.optimizer_host_s - ahead_s)
        return StepParts(self.micro_batches, alone_s, sum_s, optimizer_s)


def step_load(way: MicroBatchRun, rates: Rates, more_launches: int = 0) -> StepLoad:
    """Return the work of device and host in a step or an evaluation's micro-batch; `more_launches`: eager."""
    operations = micro_batch(way)
    each_s, cuda = rates.launch_s(compiled=False), way.spec.cuda
    work_s = busy_s(operations, rates) + waits_s(way, operations, rates)
    host_s = more_launches * each_s + rates.python_s
    fixed = optimizer_launches(way)
    if way.spec.is_one_graph:
        found, fixed = launches_of(way, operations), 0
        work_s, host_s = work_s + GAP_S * sum(op.runs for op in operations), found.micro * each_s
    elif cuda:
        found = launches_of(way, operations)
        host_s += beside_kernels(way) * each_s + found.micro * rates.launch_s(compiled=way.compiled)
    else:
        found = Launches(0, 0, fixed)
        host_s += sum(op.runs for op in operations) * rates.launch_s(compiled=way.compiled)
    if not way.train:
        return StepLoad(1, cuda, work_s, host_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    many = cuda and fixed > FUSED_LAUNCHES  # small kernels: the longer of running and launching
    return StepLoad(
        micro_batches=way.config.gradient_accumulation_steps, behind=cuda, work_s=work_s,
        host_s=host_s, sum_work_s=busy_s(accumulation(way), rates), sum_host_s=found.sums * each_s,
        optimizer_work_s=busy_s(optimizer(way), rates), optimizer_host_s=found.optimizer * each_s,
        start_s=0.0 if many else fixed * each_s,
    )  # fmt: skip


def step_parts(way: MicroBatchRun, rates: Rates, more_launches: int = 0) -> StepParts:
    """Return the parts, before a measured step corrects them. `more_launches`: of a micro-batch, beside its own."""
    return step_load(way, rates, more_launches).parts()


# Of the expected time; nearly all published runs of benchmarks/published_logs.json are within it. Half the data-centre
# and workstation cards are limited by power, which GeForce cards have enough of.
LOW, HIGH = 0.75, 1.55
GEFORCE_LOW, GEFORCE_HIGH = 0.75, 1.25
# For a card whose rate follows from another one's by power: boards that others measured took 0.76 to 1.15 times the
# rule's time (tests/predict/speed/test_sustained.py).
DERIVED_LOW, DERIVED_HIGH = 0.76, 1.15
CPU_LOW, CPU_HIGH = 0.45, 2.5
# Of a CPU's calibration, and of a card's step that `foretrain tune` timed. A card's calibration alone has the range of
# the catalogue: on the one such card it was no nearer (docs/trust.md).
CALIBRATED_LOW, CALIBRATED_HIGH = 0.88, 1.15
DISTURBED_LOW, DISTURBED_HIGH = 0.45, 1.5  # other programs slowed the calibration; alone the device is faster
# Of the expected time where a card waits for its host, of which the catalogue knows nothing. The fast end is an EPYC
# with 8 us per launch; an H100's slow host (29 us, 34 to 51 compiled) is inside. nanoGPT#392 is not: 40.4 ms eager and
# 22.0 compiled for 4 x 128 with one micro-batch are 139 and 90 us, on an unnamed machine.
HOST_LOW, HOST_HIGH = 0.4, 2.8
# Of a calibrated one: on the H100's virtual host, steps that waited for it took 0.64 to 1.19 of their middle.
CALIBRATED_HOST_LOW, CALIBRATED_HOST_HIGH = 0.7, 1.35
# Compilation alone: 8 to 13 s logged on an RTX 4070 at 12 layers, 28 to 39 s on others; up to 90 with max_autotune.
COMPILE_S = (8.0, 25.0, 60.0)


class Range(Record):
    low_s: float
    expected_s: float
    high_s: float

    def scaled(self, factor: float) -> "Range":
        return Range(low_s=self.low_s * factor, expected_s=self.expected_s * factor, high_s=self.high_s * factor)

    def plus(self, other: "Range") -> "Range":
        return Range(
            low_s=self.low_s + other.low_s,
            expected_s=self.expected_s + other.expected_s,
            high_s=self.high_s + other.high_s,
        )


def _step_s(way: MicroBatchRun, rates: Rates) -> float:
    return step_parts(way, rates).step_s


def range_of(expected_s: float, gpu: Gpu, *, as_nanogpt: bool = True) -> Range:
    """Return the range of a time from the catalogue; `as_nanogpt`: of a step like nanoGPT's."""
    low, high = _shares(gpu, as_nanogpt)
    return Range(low_s=expected_s * low, expected_s=expected_s, high_s=expected_s * high)


def range_between(
    time_s: Callable[[float, float], float], gpu: Gpu, *, as_nanogpt: bool = True, any_host: bool = True
) -> Range:
    """Return the range of a time that `time_s` computes for factors of the device and, with `any_host`, the host."""
    if gpu.kind != "cuda" or not any_host:
        return range_of(time_s(1.0, 1.0), gpu, as_nanogpt=as_nanogpt)
    low, high = _shares(gpu, as_nanogpt)
    return Range(low_s=time_s(low, HOST_LOW), expected_s=time_s(1.0, 1.0), high_s=time_s(high, HOST_HIGH))


def _shares(gpu: Gpu, as_nanogpt: bool) -> tuple[float, float]:
    if gpu.kind == "cpu":
        low, high = CPU_LOW, CPU_HIGH
    else:
        low, high = (GEFORCE_LOW, GEFORCE_HIGH) if gpu.is_geforce and as_nanogpt else (LOW, HIGH)
    if gpu.sustained_like:
        low, high = low * DERIVED_LOW, high * DERIVED_HIGH
    # A laptop's power limit is its maker's: the version with the least power is the slow end.
    return low, high / gpu.slowest_share


def _range(time_s: Callable[[float, float], float], rates: Rates, way: MicroBatchRun) -> Range:
    if not isinstance(rates, MeasuredRates):
        # With torch 2.0 a compiled kernel took about as long on three machines.
        any_host = way.torch.fast_launches or not way.compiled
        return range_between(time_s, way.spec.gpu, as_nanogpt=_as_nanogpt(way), any_host=any_host)
    # What varied during the measurement will vary again, as a virtual machine's speed does.
    unsteady = 1 + min(1.0, max(rates.calibration.unsteadiness, rates.calibration.drift))
    timed = not way.spec.cuda or tuned_like(rates.calibration, way.spec)
    low, high = (CALIBRATED_LOW, CALIBRATED_HIGH) if timed else (LOW, HIGH)
    low, high = low / unsteady, high * unsteady
    if rates.calibration.disturbed:
        low, high = min(low, DISTURBED_LOW), max(high, DISTURBED_HIGH)
    host_low, host_high = (low, high)
    if way.spec.cuda:
        host_low, host_high = min(low, CALIBRATED_HOST_LOW), max(high, CALIBRATED_HOST_HIGH)
    expected_s = time_s(1.0, 1.0)
    return Range(low_s=time_s(low, host_low), expected_s=expected_s, high_s=time_s(high, host_high))


def _as_nanogpt(way: MicroBatchRun) -> bool:
    """Return whether published runs cover such a step: nanoGPT's model and optimizer on the card, in its dtype."""
    c = way.config
    usual = c.recipe == "nanogpt" and c.optimizer == "adamw" and not c.optimizer_offload
    return usual and way.spec.matmul == "dtype" and way.spec.half


def bound_s(way: MicroBatchRun) -> float:
    """Return the least time of a step, its causal FLOPs at the dense peaks; 0 where one of these is unknown."""
    modes: dict[MatmulMode, list[Operation]] = {}
    for op in step_operations(way):
        modes.setdefault(op.arithmetic, []).append(op)
    peaks = {mode: way.spec.gpu.matmul_peak_flop_per_s(mode, way.spec.dtype) for mode in modes}
    if None in peaks.values():
        return 0.0
    return sum(flops(operations, causal=True) / (peaks[mode] or math.inf) for mode, operations in modes.items())


def _correction(way: MicroBatchRun, rates: Rates) -> float:
    """Return a measured step over the sum of its kernels, of a step like this that `foretrain tune` timed, else the
    calibration's of the same dtype and mode by nearness; else 1. Evaluations: by their forward passes, where timed."""
    if not isinstance(rates, MeasuredRates):
        return 1.0
    tuned = tuned_like(rates.calibration, way.spec)
    references = [tuned] if tuned else _references(way, rates.calibration)
    points = sorted(_point(reference, way, rates) for reference in references)
    if not points:
        return 1.0
    (low_s, low), (high_s, high) = points[0], points[-1]
    own_s = _step_s(replace(way, train=True), rates)
    if high_s <= low_s or own_s <= low_s:
        return low
    share = min(1.0, math.log(own_s / low_s) / math.log(high_s / low_s))
    return low ** (1 - share) * high**share


def _references(way: MicroBatchRun, calibration: Calibration) -> list[StepTime]:
    """Return the calibration's steps of this dtype and mode: of each size the one carried out as this step, where it
    was measured, else the plain one. Where a card's were timed in another dtype alone, that one's: kernels are measured
    in each, and the correction was the same for all, within 5% on an H100.
    """
    found: dict[str, StepTime] = {}
    plain = {"attention": "auto", "master_weights": False}
    own = {"attention": "bmm" if way.matmul_attention else "auto", "master_weights": way.config.master_weights}
    steps = calibration.steps_of(way.spec.dtype, compiled=way.compiled)
    if way.spec.cuda and not steps:
        steps = [step for step in calibration.steps if step.compiled == way.compiled]
    for step in steps:
        size = str(sorted((name, value) for name, value in step.options.items() if name not in plain))
        its = {name: step.options.get(name, usual) for name, usual in plain.items()}
        if its == own or (its == plain and size not in found):
            found[size] = step
    return list(found.values())


def _point(reference: StepTime, way: MicroBatchRun, rates: Rates) -> tuple[float, float]:
    """Return (the sum of a reference step's kernels in seconds, its correction)."""
    dtype: Any = reference.dtype
    step = MicroBatchRun(StepSpec.of(launched(reference.options), way.spec.gpu, dtype=dtype, compiled=way.compiled))
    summed_s = _step_s(step, rates)
    if not way.train and reference.forward_s is not None:
        return summed_s, reference.forward_s / step_load(replace(step, train=False), rates).micro_batch_s()
    return summed_s, reference.time_s / summed_s


def micro_batch_run(spec: StepSpec, *, train: bool = True) -> MicroBatchRun:
    return MicroBatchRun(spec, train, spec.torch if spec.cuda else software.ASSUMED)


def known_rates(way: MicroBatchRun) -> Rates | None:
    known = family_of(way.config).is_timed(compiled=way.compiled)
    return _rates_of(way) if known else None


def _rates_of(way: MicroBatchRun) -> Rates | None:
    return rates_of(way.spec.gpu, way.spec.dtype, way.spec.matmul, way.torch)


def is_calibrated(spec: StepSpec) -> bool:
    return isinstance(_rates_of(micro_batch_run(spec)), MeasuredRates)


def step_time(spec: StepSpec) -> Range | None:
    """Return seconds of one steady optimizer step, all micro-batches; None where the device's speed is unknown."""
    way = micro_batch_run(spec)
    rates = known_rates(way)
    if rates is None:
        return None
    load, correction = step_load(way, rates), _correction(way, rates)
    found = _range(lambda work, host: correction * load.parts(work, host).step_s, rates, way)
    if not spec.cuda:  # its peak is a guess at the clock
        return found
    least_s = bound_s(way)
    return Range(low_s=max(found.low_s, least_s), expected_s=max(found.expected_s, least_s), high_s=found.high_s)


def evaluation_time(spec: StepSpec) -> Range | None:
    """Return seconds of one evaluation: the same sequences of each of two splits, however they are cut."""
    way, config = micro_batch_run(spec, train=False), spec.config
    rates = known_rates(way)
    if rates is None:
        return None
    batches = config.eval_iters if spec.keeps_logits else config.eval_rows / config.eval_batch
    load, times = step_load(way, rates), 2 * batches * _correction(way, rates)
    return _range(lambda work, host: times * load.micro_batch_s(work, host), rates, way)


def compile_time(compiled: bool) -> Range:
    low, expected, high = COMPILE_S if compiled else (0.0, 0.0, 0.0)
    return Range(low_s=low, expected_s=expected, high_s=high)
