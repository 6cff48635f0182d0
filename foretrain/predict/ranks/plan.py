"""A run on several cards, with each way to share its step: memory of a rank, time, energy, money. No torch.

Instant, as the plan of one card is, from which it begins. A rank's memory is that of the one with the most to hold.
"""

import math
from typing import Literal

from foretrain.base.records import Note
from foretrain.config.options import RunConfig
from foretrain.config.ranks import of_rank
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.model.ranks.sharing import Sharing, StrategyName
from foretrain.predict.memory import PhaseMemory, StepMemory, Verdict, estimated
from foretrain.predict.plan import Plan, Timing, whole_run
from foretrain.predict.ranks.nccl import NcclMemory
from foretrain.predict.ranks.record import ClusterPlan, Factor, RankPlan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import rank_time, sharings
from foretrain.predict.speed.time import Range, compile_time, evaluation_time, is_calibrated

ALIKE = 1.02  # a step that is so much longer is as good: the plainer strategy is taken
WHOLE_TENSORS = ("muon", "adamw8bit")  # optimizers that do not work on shards of tensors


def share(plan: Plan, cluster: Cluster, strategy: StrategyName | Literal[""] = "") -> ClusterPlan:
    """The plan of one card's run on several. `strategy`: the one that is meant; by default the quickest that fits.

    Raises UserError where the ranks cannot share a step equally.
    """
    config = of_rank(plan.config, cluster.world)
    possible = sharings(cluster, config.gradient_accumulation_steps)
    refused: list[Note] = []
    if plan.config.optimizer in WHOLE_TENSORS:
        refused.append(Note(id="whole_tensors", values={"optimizer": plan.config.optimizer}))
        possible = [sharing for sharing in possible if sharing.strategy == "ddp"]
    ranks = tuple(_rank(plan, config, cluster, sharing) for sharing in possible)
    meant = tuple(rank for rank in ranks if not strategy or rank.strategy == strategy)
    best = choose(meant, any_of=bool(strategy))
    return ClusterPlan(
        name=plan.name, cluster=cluster, one_card=plan, micro_batches=config.gradient_accumulation_steps, ranks=ranks,
        refused=tuple(refused), chosen=best.id if best else None, asked=bool(strategy),
    )  # fmt: skip


def of_run(plan: Plan, world: int, per_node: int) -> Plan:
    """The plan of one device's run as that of one that ranks share: memory of the one with the most to hold, times of
    all, over the links that such cards usually have. `plan.config` is the config of all.

    Ranks on a CPU have no time, since nobody knows what they send each other there. Raises UserError where they cannot
    share a step equally.
    """
    per_node = per_node if world % per_node == 0 else world
    made = plan.model_copy(
        update={"world": world, "per_node": per_node, "timing": None, "nanogpt_timing": None, "exact": ()}
    )
    spec, timing = made.spec("foretrain"), None
    if plan.gpu.kind == "cuda" and spec.sharing is not None:
        cards = cluster(f"{world // per_node} nodes x {per_node}", here=lambda: plan.gpu)
        found = _rank(plan, spec.config, cards, spec.sharing)
        memory, timing = _beside(found.memory, found.nccl), found.timing
    else:
        room = plan.available_bytes
        memory = estimated(spec).judged(room // per_node if room is not None else None, plan.gpu.memory_bytes)
    memories = tuple(memory if each.step == memory.step else each for each in plan.memory)
    return made.model_copy(update={"memory": memories, "timing": timing})


def _beside(memory: StepMemory, nccl: NcclMemory) -> StepMemory:
    """NCCL's memory counted to what a process holds beside PyTorch's allocator, as its phases have it in what they
    need."""
    names = ("low_bytes", "expected_bytes", "high_bytes")
    held = {name: getattr(memory.context, name) + getattr(nccl, name) for name in names}
    return memory.model_copy(update={"context": memory.context.model_copy(update=held)})


def choose(ranks: tuple[RankPlan, ...], *, any_of: bool = False) -> RankPlan | None:
    """The quickest that fits, of those about as quick the first; else of those that are tight. `any_of`: also of those
    that do not fit."""
    for verdict in ("fits", "tight", None, *(("does_not_fit",) if any_of else ())):
        fitting = [rank for rank in ranks if rank.verdict == verdict]
        if not fitting:
            continue
        timed = [rank for rank in fitting if rank.time is not None]
        if not timed:
            return fitting[0]
        quickest = min(rank.time.step_s.expected_s for rank in timed if rank.time)
        return next(rank for rank in timed if rank.time and rank.time.step_s.expected_s <= ALIKE * quickest)
    return None


def _rank(plan: Plan, config: RunConfig, cluster: Cluster, sharing: Sharing) -> RankPlan:
    """`config`: one rank's, `plan.config` that of all."""
    spec = StepSpec.of(config, cluster.gpu, dtype=plan.dtype, compiled=plan.compiled, sharing=sharing)
    nccl = NcclMemory.of(cluster, sharing)
    time = rank_time(spec, sharing, cluster)
    timing, faster = None, None
    if time is not None:
        whole = plan.spec("foretrain")
        source = "calibrated" if is_calibrated(spec) else "estimated"
        compiling = compile_time(spec.compiled)
        timing = whole_run(whole, source, time.step_s, _evaluation(whole, cluster), compiling, cluster.world)
        faster = speed_up(plan.timing, timing) if plan.timing else None
    return RankPlan(
        strategy=sharing.strategy, syncs_each=sharing.syncs_each, memory=_memory(spec, plan.available_bytes, nccl),
        nccl=nccl, time=time, timing=timing, speed_up=faster,
        efficiency=faster.expected / cluster.world if faster else None,
    )  # fmt: skip


def _evaluation(spec: StepSpec, cluster: Cluster) -> Range | None:
    """Each rank does every so many-th batch of it, so the first ones do the most."""
    alone, batches = evaluation_time(spec), math.ceil(spec.config.eval_rows / spec.config.eval_batch)
    return alone.scaled(math.ceil(batches / cluster.world) / batches) if alone else None


def speed_up(alone: Timing, shared: Timing) -> Factor:
    """One card's step over that of all, quick with quick and slow with slow: both have the same card."""
    ends = ((getattr(alone.step_s, name), getattr(shared.step_s, name)) for name in ("low_s", "expected_s", "high_s"))
    factors = [one / several for one, several in ends]
    return Factor(low=min(factors), expected=factors[1], high=max(factors))


def _memory(spec: StepSpec, available_bytes: int | None, nccl: NcclMemory) -> StepMemory:
    """A rank's phases with NCCL's own memory in what they need, and judged with it: it fits with what is expected of
    NCCL, and does not fit where it would not even with the least."""
    ledger, card = estimated(spec), spec.gpu.memory_bytes
    if available_bytes is None:
        return _with(ledger.judged(None, card), nccl)
    leniently, strictly = (
        ledger.judged(max(0, available_bytes - size), card) for size in (nccl.low_bytes, nccl.expected_bytes)
    )
    phases = tuple(_both(a, b) for a, b in zip(leniently.phases, strictly.phases, strict=True))
    return _with(leniently.model_copy(update={"phases": phases}), nccl)


def _both(leniently: PhaseMemory, strictly: PhaseMemory) -> PhaseMemory:
    verdict: Verdict = "tight"
    if leniently.verdict == "does_not_fit":
        verdict = "does_not_fit"
    elif strictly.verdict == "fits":
        verdict = "fits"
    return leniently.model_copy(update={"verdict": verdict})


def _with(memory: StepMemory, nccl: NcclMemory) -> StepMemory:
    phases = tuple(
        phase.model_copy(
            update={
                "needed_low_bytes": phase.needed_low_bytes + nccl.low_bytes,
                "needed_expected_bytes": phase.needed_expected_bytes + nccl.expected_bytes,
                "needed_high_bytes": phase.needed_high_bytes + nccl.high_bytes,
            }
        )
        for phase in memory.phases
    )
    return memory.model_copy(update={"phases": phases})
