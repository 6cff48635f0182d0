"""What DDP's buckets bring here: gradients that are views of them, which foretrain always has, and other sizes of them.

Neither is an option of a config. The figures say why: what a card would take without views, and what the best other
size would save.
"""

from dataclasses import replace

from foretrain.advice.record import Idle
from foretrain.base.units import MIB
from foretrain.model.ranks.sharing import Sharing
from foretrain.predict.memory import estimated
from foretrain.predict.ranks.plan import of_one_rank
from foretrain.predict.ranks.record import ClusterPlan
from foretrain.predict.speed.ranks import BUCKET_BYTES, rank_time, sharings

SHOWN = 0.001  # of a step: less is nothing
SIZES = tuple(MIB * size for size in (1, 5, 10, 50, 100, 200, 400))


def buckets(plan: ClusterPlan, way: str) -> list[Idle]:
    """Both, where DDP or ZeRO-1 is what the cards do."""
    sharing = next(each for each in sharings(plan.cluster, plan.micro_batches) if each.id == way)
    return [] if sharing.way.shards_weights else [_views(plan, sharing), *_sizes(plan, sharing)]


def _views(plan: ClusterPlan, sharing: Sharing) -> Idle:
    whole = plan.one_card.spec("foretrain")
    ways = (sharing, replace(sharing, bucket_view=False))
    specs = [of_one_rank(whole, plan.cluster, each) for each in ways]
    # As in most steps: buckets that NCCL keeps in the second one are in both.
    ledgers = [estimated(spec, keeps=False) for spec in specs]
    now, without = (max(phase.allocated_bytes for phase in ledger.memory.phases) for ledger in ledgers)
    more = max(0, without - now)
    return Idle(rule="bucket_view", reason="bucket_view" if more else "bucket_view_same", values={"more": more})


def _sizes(plan: ClusterPlan, sharing: Sharing) -> list[Idle]:
    spec = of_one_rank(plan.one_card.spec("foretrain"), plan.cluster, sharing)
    now = rank_time(spec, sharing, plan.cluster)
    if now is None:
        return []
    steps = {size: rank_time(spec, sharing, plan.cluster, size) for size in SIZES}
    seconds = {size: time.step_s.expected_s for size, time in steps.items() if time}
    best = min(seconds, key=lambda size: seconds[size])
    gain = max(0.0, 1 - seconds[best] / now.step_s.expected_s)
    values = {"gain": gain, "best": best, "usual": BUCKET_BYTES}
    return [Idle(rule="bucket_size", reason="bucket_size" if gain >= SHOWN else "bucket_size_same", values=values)]
