"""The time of a step on several cards: one card's share of the work, and its waits for communication.

Each strategy as PyTorch runs it. DDP sums gradients, fp32 as its weights, in buckets, last gradients first, during the
last micro-batch's backward pass (torch/nn/parallel/distributed.py: 25 MiB, the first bucket 1 MiB); a step waits for
what is not done when that pass ends, at least a part of the last bucket. ZeRO-1 also broadcasts each rank's updated
weights after the step. FSDP2 gathers the weights of a block in the matmuls' dtype during the block before it, and sums
gradients in fp32 into shards during the block behind it; both are one queue, since they are on one communicator
(torch/distributed/fsdp/_fully_shard). HSDP does so in each node, and sums the shards between nodes beside it.

Left out: NCCL's kernels take SMs and bandwidth from the matmuls beside them; ranks wait for the slowest.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from foretrain.base.records import Record
from foretrain.config.shape import ModelShape
from foretrain.config.sharing import STRATEGIES, Sharing
from foretrain.hardware.cluster import Cluster
from foretrain.predict.estimate.ranks import BUCKET_BYTES, deal, in_buckets
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.collectives import Collective, Group, collective_time
from foretrain.predict.speed.ops import MicroBatchRun, OperationList, micro_batch
from foretrain.predict.speed.rates import Rates, busy_s
from foretrain.predict.speed.time import Range, StepParts, known_rates, micro_batch_run, step_parts, step_time

SHARD_BYTES = 4  # FSDP sums gradients in fp32
# Operations around a collective of FSDP2 with the host's cost of a launch: a dispatcher's extra count for each block
# (allocation, copy in, collective, copy out and the views between them).
GATHER_LAUNCHES, REDUCE_LAUNCHES = 11, 9
# Errors of planned collectives: of the estimated time a low one, and of that on the worst published machine a high one.
# Through host memory the published runs of RTX 4090 reach 2.2 to 15 GB/s (planned 10, worst 3.8); elsewhere most are
# within a fifth (benchmarks/collectives_measured.py).
THROUGH_HOST, ELSEWHERE = (0.67, 1.75), (0.8, 1.25)


class Communication(Record):
    """One kind of communication in a rank's step. `size_bytes`: all calls together; `busy_s`: theirs, hidden or not."""

    what: str
    collective: Collective
    calls: int
    size_bytes: int
    busy_s: float


class RankTime(Record):
    """A step of the whole cluster. `compute_s`: one rank's work alone; `waits_s`: its waits for others."""

    step_s: Range
    compute_s: Range
    waits_s: Range
    communication: tuple[Communication, ...]

    @property
    def waiting_share(self) -> float:
        return self.waits_s.expected_s / self.step_s.expected_s


def groups_of(cluster: Cluster, *, worst: bool = False) -> dict[str, Group]:
    """Return ranks that communicate: `all`, those of a `node`, one of each node (`between`) with all its NICs."""
    network = {"network": cluster.network, "nics_per_node": cluster.nics_per_node, "nodes": cluster.nodes}
    return {
        "all": Group(ranks_per_node=cluster.per_node, link=cluster.link, worst=worst, **network),
        "node": Group(ranks_per_node=cluster.per_node, link=cluster.link, worst=worst),
        "between": Group(ranks_per_node=1, link=cluster.link, worst=worst, **network),
    }


@dataclass(frozen=True)
class _Weights:
    """Elements of the model: by tensor in the order in which gradients are ready, and by group that FSDP gathers."""

    tensors: tuple[tuple[float, int], ...]  # (blocks that were done before, of all; elements)
    root: int
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, spec: StepSpec) -> "_Weights":
        shape = ModelShape.of(spec.config)
        layers, block = shape.n_layer, shape.block_numels
        parameters = list(shape.parameters())
        inside = {name.name for i in range(layers) for name in shape.block_parameters(f"{shape.family.blocks}.{i}.")}
        first = next(i for i, p in enumerate(parameters) if p.name in inside)
        ready: list[tuple[float, int]] = []
        done = 0
        for i, parameter in reversed(list(enumerate(parameters))):
            if parameter.name in inside:
                done = layers - (i - first) // len(block)
                ready.append((done / layers, parameter.numel))
            else:
                ready.append((math.inf if i < first else 0.0, parameter.numel))
        root = sum(p.numel for p in parameters if p.name not in inside)
        return cls(tuple(ready), root, (sum(block),) * layers)

    @property
    def total(self) -> int:
        return self.root + sum(self.blocks)


@dataclass(frozen=True)
class Pace:
    """Seconds of one rank's micro-batch: the blocks' passes, and what is outside of them (the head and its loss)."""

    blocks: int
    forward_root: float = 0.0
    forward_block: float = 0.0
    backward_root: float = 0.0
    backward_block: float = 0.0

    @property
    def forward(self) -> float:
        return self.forward_root + self.blocks * self.forward_block

    @property
    def backward(self) -> float:
        return self.backward_root + self.blocks * self.backward_block

    def scaled(self, factor: float) -> "Pace":
        four = (self.forward_root, self.forward_block, self.backward_root, self.backward_block)
        return Pace(self.blocks, *(factor * each for each in four))


def _pace(way: MicroBatchRun, rates: Rates, micro_batch_s: float) -> Pace:
    """Divide the time of a micro-batch by its kernels' work. One more block adds a block's time."""

    def busy(layers: int) -> tuple[float, float]:
        spec = way.spec.but(n_layer=layers)
        ops = micro_batch(MicroBatchRun(spec, way.train, way.torch))
        forward = [op for op in ops if op.part == "forward"]
        return busy_s(forward, rates), busy_s([op for op in ops if op.part != "forward"], rates)

    layers = way.config.n_layer
    fewer, more = (1, 2) if layers == 1 else (1, layers)
    less, all_of, own = busy(fewer), busy(more), busy(layers)
    factor = micro_batch_s / (sum(own) or 1.0)
    found: list[float] = []
    for i in (0, 1):
        block = max(0.0, (all_of[i] - less[i]) / (more - fewer))
        found += [factor * max(0.0, own[i] - layers * block), factor * block]
    return Pace(layers, *found)


Times = Callable[[Collective, float], float]


class _Queue:
    def __init__(self, times: Times) -> None:
        self.times, self.free = times, 0.0

    def send(self, collective: Collective, size: float, ready: float) -> float:
        self.free = max(self.free, ready) + self.times(collective, size)
        return self.free


def _buckets(weights: _Weights, pace: Pace, element_bytes: int, most: int) -> Iterator[tuple[float, int]]:
    for last, size in in_buckets([element_bytes * numel for _, numel in weights.tensors], most):
        done, _ = weights.tensors[last]
        blocks = min(1.0, done) * pace.blocks
        yield (pace.backward if math.isinf(done) else pace.backward_root + blocks * pace.backward_block), size


def waits_for_sums_s(buckets: Iterable[tuple[float, int]], backward_s: float, times: Times) -> float:
    """Return a step's wait for sums when its backward pass ends. `buckets`: (when each is full, its bytes)."""
    queue = _Queue(times)
    for ready, size in buckets:
        queue.send("all_reduce", size, ready)
    return max(0.0, queue.free - backward_s)


@dataclass(frozen=True)
class Unit:
    """Weights that FSDP gathers together: bytes of these and of their gradients, which are sent, and the passes that
    need them. `reshards`: they are gathered again for the backward pass; `outer`: gathered first, and sent last."""

    gathered_bytes: float
    sent_bytes: float
    forward_s: float
    backward_s: float
    reshards: bool
    outer: bool = False


def shared_passes_s(units: Sequence[Unit], shards: Times, between: Times | None = None) -> float:
    """Return how long a micro-batch's passes take with waits, `units` in forward order. `between`: HSDP's sums."""
    queue, sums = _Queue(shards), _Queue(between or shards)

    def gather(unit: Unit, ready: float) -> float:
        return queue.send("all_gather", unit.gathered_bytes, ready)

    def reduce(unit: Unit, ready: float) -> None:
        if not unit.sent_bytes:
            return
        done = queue.send("reduce_scatter", unit.sent_bytes, ready)
        if between:
            sums.send("all_reduce", unit.sent_bytes, done)

    outer = [unit for unit in units if unit.outer]
    started = now = 0.0
    for unit in outer:
        started = now = gather(unit, 0.0)
    for unit in units:  # gathered while the one before it runs
        if not unit.outer:
            arrived = gather(unit, started)
            started = max(now, arrived)
            now = started + unit.forward_s
    now += sum(unit.forward_s for unit in outer)
    arrivals = dict.fromkeys(range(-1, len(units)), now)
    for i in reversed(range(len(units))):
        if i + 1 == len(units) and units[i].reshards:
            arrivals[i] = gather(units[i], now)
        started = max(now, arrivals[i])
        if i and units[i - 1].reshards:
            arrivals[i - 1] = gather(units[i - 1], started)
        now = started + units[i].backward_s
        if not units[i].outer:
            reduce(units[i], now)
    for unit in outer:
        reduce(unit, now)
    return max(now, queue.free, sums.free)


def scenarios(cluster: Cluster) -> tuple[tuple[dict[str, Group], float], ...]:
    """Return (groups, factor on their collectives' usual time): a good link, a usual one, the worst published."""
    quick, slow = THROUGH_HOST if cluster.link.through_host else ELSEWHERE
    usual, worst = groups_of(cluster), groups_of(cluster, worst=True)
    return (usual, quick), (usual, 1.0), (worst, slow)


def timed(group: Group, factor: float) -> Times:
    return cache(lambda collective, size: factor * collective_time(collective, size, group).seconds)


def scenario_times(cluster: Cluster) -> Iterator[Times]:
    """Yield how long collectives of all cards take: with a good link, a usual one, the worst published."""
    return (timed(groups["all"], factor) for groups, factor in scenarios(cluster))


def largest_share(numels: list[int], world: int) -> float:
    """Return the share of ZeRO-1's rank with most (estimate/ranks.py)."""
    sizes = [0] * world
    deal(numels, sizes)
    return max(sizes) / (sum(numels) or 1)


class _Step:
    def __init__(
        self,
        spec: StepSpec,
        sharing: Sharing,
        weights: _Weights,
        groups: dict[str, Group],
        factor: float,
        bucket_bytes: int,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.spec, self.sharing, self.weights, self.groups, self.factor = spec, sharing, weights, groups, factor
        self.low, self.wide = 2 if spec.half else 4, spec.variant.wide
        self.times = {name: timed(group, factor) for name, group in groups.items()}

    def waits_s(self, pace: Pace, micro_batches: int) -> float:
        if not self.sharing.way.shards_weights:
            buckets = _buckets(self.weights, pace, self.wide, self.bucket_bytes)
            waits = waits_for_sums_s(buckets, pace.backward, self.times["all"])
            if self.sharing.strategy != "zero1":
                return waits
            return waits + sum(self.times["all"]("broadcast", self.wide * numel) for _, numel in self.weights.tensors)
        own = pace.forward + pace.backward
        last = self._fsdp_s(pace, sums=True) - own
        before = last if self.sharing.syncs_each else self._fsdp_s(pace, sums=False) - own
        return last + (micro_batches - 1) * before

    def _fsdp_s(self, pace: Pace, *, sums: bool) -> float:
        weights, way = self.weights, self.sharing.way

        def unit(numel: int, forward_s: float, backward_s: float, *, outer: bool = False) -> Unit:
            sent = SHARD_BYTES * numel if sums else 0
            return Unit(self.low * numel, sent, forward_s, backward_s, way.reshards, outer)

        blocks = [unit(numel, pace.forward_block, pace.backward_block) for numel in weights.blocks]
        root = unit(weights.root, pace.forward_root, pace.backward_root, outer=True)
        between = self.times["between"] if way.replicates else None
        return shared_passes_s([*blocks, root], self.times["node" if way.replicates else "all"], between)


def _share(sharing: Sharing, weights: _Weights) -> float:
    if sharing.way.shards_weights:
        return 1 / (sharing.per_node if sharing.way.replicates else sharing.world)
    return largest_share([n for _, n in weights.tensors], sharing.world) if sharing.strategy == "zero1" else 1.0


def _copies_s(way: MicroBatchRun, rates: Rates, sharing: Sharing, parts: StepParts, weights: _Weights) -> float:
    """Return what sharing adds to a rank's kernels: DDP divides gradients, FSDP copies weights and gradients."""
    ops, numel, n = OperationList(way), weights.total, parts.micro_batches
    if not sharing.way.shards_weights:
        ops.traffic("bucket", "clip", numel, way.wide, way.wide)
        return busy_s(ops.found, rates)
    ops.traffic("gathered", "add", numel, way.low, way.low, n * (2 if sharing.way.reshards else 1))
    ops.traffic("reduced", "add", numel, way.low, SHARD_BYTES, n if sharing.syncs_each else 1)
    return busy_s(ops.found, rates)


def _launches(sharing: Sharing, weights: _Weights) -> int:
    if not sharing.way.shards_weights:
        return 0
    a_group = GATHER_LAUNCHES * (2 if sharing.way.reshards else 1) + REDUCE_LAUNCHES * sharing.syncs_each
    return a_group * (1 + len(weights.blocks))


def _own(way: MicroBatchRun, rates: Rates, sharing: Sharing, weights: _Weights) -> StepParts:
    parts, share = step_parts(way, rates, _launches(sharing, weights)), _share(sharing, weights)
    sums = share if sharing.way.shards_weights and sharing.syncs_each else 1.0
    optimizer_s = share * parts.optimizer_s + _copies_s(way, rates, sharing, parts, weights)
    return replace(parts, sum_s=sums * parts.sum_s, optimizer_s=optimizer_s)


def _communication(step: _Step, micro_batches: int) -> tuple[Communication, ...]:
    weights, sharing = step.weights, step.sharing
    found: list[Communication] = []

    def add(what: str, collective: Collective, sizes: list[int], times: int, group: str = "all") -> None:
        busy_s = times * sum(step.times[group](collective, size) for size in sizes)
        found.append(
            Communication(
                what=what, collective=collective, calls=times * len(sizes), size_bytes=times * sum(sizes), busy_s=busy_s
            )
        )

    if not sharing.way.shards_weights:
        ordered = Pace(len(weights.blocks))
        add(
            "gradients", "all_reduce", [size for _, size in _buckets(weights, ordered, step.wide, step.bucket_bytes)], 1
        )
        if sharing.strategy == "zero1":
            add("updated", "broadcast", [step.wide * numel for _, numel in weights.tensors], 1)
        return tuple(found)
    group = "node" if sharing.way.replicates else "all"
    parts = [weights.root, *weights.blocks]
    half, full = ([size * numel for numel in parts] for size in (step.low, SHARD_BYTES))
    add("weights_forward", "all_gather", half, micro_batches, group)
    if sharing.way.reshards:
        add("weights_backward", "all_gather", half, micro_batches, group)
    sums = micro_batches if sharing.syncs_each else 1
    add("gradients", "reduce_scatter", full, sums, group)
    if sharing.way.replicates:
        add("gradients_between", "all_reduce", full, sums, "between")
    return tuple(found)


def rank_time(spec: StepSpec, sharing: Sharing, cluster: Cluster, bucket_bytes: int = BUCKET_BYTES) -> RankTime | None:
    """Return a shared step; None where the card's speed is unknown. `bucket_bytes`: of DDP's later buckets. Low: a fast
    card and a good link; high: a slow card, and the worst published link."""
    way = micro_batch_run(spec)
    rates, alone = known_rates(way), step_time(spec)
    if rates is None or alone is None:
        return None
    weights, parts = _Weights.of(spec), step_parts(way, rates)
    own = _own(way, rates, sharing, weights)
    pace = _pace(way, rates, own.micro_batch_s)
    steps = [_Step(spec, sharing, weights, groups, factor, bucket_bytes) for groups, factor in scenarios(cluster)]
    slower = [seconds / parts.step_s for seconds in (alone.low_s, alone.expected_s, alone.high_s)]
    compute = [factor * own.step_s for factor in slower]
    waits = [step.waits_s(pace.scaled(factor), parts.micro_batches) for step, factor in zip(steps, slower, strict=True)]
    expected = steps[1]
    return RankTime(
        step_s=_range([c + w for c, w in zip(compute, waits, strict=True)]), compute_s=_range(compute),
        waits_s=_range(waits), communication=_communication(expected, parts.micro_batches),
    )  # fmt: skip


def _range(times: list[float]) -> Range:
    return Range(low_s=min(times), expected_s=times[1], high_s=max(times))


def sharings(cluster: Cluster, micro_batches: int) -> list[Sharing]:
    """Return the ways to share a step; HSDP needs several nodes of several cards, FSDP may sum at the end."""
    several = cluster.nodes > 1 and cluster.per_node > 1
    return [
        Sharing(strategy=name, world=cluster.world, per_node=cluster.per_node, syncs_each=syncs_each)
        for name, way in STRATEGIES.items()
        if several or not way.replicates
        for syncs_each in ((True, False) if way.shards_weights and micro_batches > 1 else (True,))
    ]
