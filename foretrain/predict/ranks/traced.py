"""A plan for several cards with the memory of each strategy from traces of its ranks: `plan --gpus --exact`. No torch
in this process."""

from foretrain.config.ranks import of_rank
from foretrain.model.ranks.sharing import Sharing
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.memory import Context, StepMemory
from foretrain.predict.ranks.nccl import NcclMemory
from foretrain.predict.ranks.plan import choose
from foretrain.predict.ranks.record import ClusterPlan, RankPlan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import sharings
from foretrain.predict.trace.forecast import Listener, RanksExact, trace_ranks


def traced(plan: ClusterPlan, settings: Settings, listen: Listener) -> ClusterPlan:
    """The plan with exact memory for every strategy, and the choice that follows from it. Of several ranks it has the
    one that needs most; where no trace can be made, the estimate stands and says why."""
    one, config = plan.one_card, of_rank(plan.config, plan.cluster.world)
    ways = {(way.strategy, way.syncs_each): way for way in sharings(plan.cluster, plan.micro_batches)}

    def asked(rank: RankPlan) -> tuple[StepSpec, StepMemory]:
        sharing: Sharing = ways[rank.strategy, rank.syncs_each]
        spec = StepSpec.of(config, one.gpu, dtype=one.dtype, compiled=one.compiled, sharing=sharing)
        context = _with_nccl(rank.memory.context, rank.nccl)
        return spec, rank.memory.model_copy(update={"context": context})

    found = trace_ranks(
        [asked(rank) for rank in plan.ranks],
        one.available_bytes,
        capped=one.available_reason == "memory_limit",
        settings=settings,
        listen=listen,
    )
    ranks = tuple(_rank(rank, exact) for rank, exact in zip(plan.ranks, found, strict=True))
    meant = tuple(rank for rank in ranks if not plan.asked or rank.strategy == plan.config.strategy)
    best = choose(meant, any_of=plan.asked)
    return plan.model_copy(update={"ranks": ranks, "chosen": best.id if best else None})


def _rank(rank: RankPlan, found: RanksExact) -> RankPlan:
    worst = found.worst
    if worst is None:
        return rank.model_copy(update={"untraced": found.reason})
    memory = worst.memory.model_copy(update={"context": rank.memory.context})
    return rank.model_copy(update={"memory": memory, "traced_ranks": found.ranks})


def _with_nccl(context: Context, nccl: NcclMemory) -> Context:
    """What a rank takes beside the allocator, with NCCL's own memory."""
    return context.model_copy(
        update={
            "low_bytes": context.low_bytes + nccl.low_bytes,
            "expected_bytes": context.expected_bytes + nccl.expected_bytes,
            "high_bytes": context.high_bytes + nccl.high_bytes,
        }
    )
