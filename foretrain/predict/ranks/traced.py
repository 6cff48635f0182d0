"""A plan for several cards with the memory of each strategy from traces of its ranks: `plan --gpus --exact`. No torch
in this process."""

from foretrain.predict.allocator.settings import Settings
from foretrain.predict.memory import StepMemory
from foretrain.predict.ranks.plan import choose, rank_spec
from foretrain.predict.ranks.record import ClusterPlan, RankPlan
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace.forecast import Listener, RanksExact, trace_ranks


def traced(plan: ClusterPlan, settings: Settings, listen: Listener) -> ClusterPlan:
    """The plan with exact memory for every strategy, and the choice that follows from it. Of several ranks it has the
    one that needs most; where no trace can be made, the estimate stands and says why."""
    one = plan.one_card

    def asked(rank: RankPlan) -> tuple[StepSpec, StepMemory]:
        spec, _ = rank_spec(one, plan.config, plan.cluster, rank)
        context = rank.nccl.beside(rank.memory.context)
        return spec, rank.memory.model_copy(update={"context": context})

    found = trace_ranks(
        [asked(rank) for rank in plan.ranks],
        one.available_bytes,
        capped=one.available_reason == "memory_limit",
        settings=settings,
        listen=listen,
    )
    ranks = tuple(_rank(rank, exact) for rank, exact in zip(plan.ranks, found, strict=True))
    best = choose(ranks, plan.ways)
    return plan.model_copy(update={"ranks": ranks, "chosen": best.id if best else None})


def _rank(rank: RankPlan, found: RanksExact) -> RankPlan:
    worst = found.worst
    if worst is None:
        return rank.model_copy(update={"untraced": found.reason})
    memory = worst.memory.model_copy(update={"context": rank.memory.context})
    return rank.model_copy(update={"memory": memory, "traced_ranks": found.ranks})
