"""What both forms of a plan for several cards say alike."""

from foretrain.config.sharing import StrategyName, of_one_strategy
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.links import Link
from foretrain.predict.memory import PhaseMemory
from foretrain.predict.ranks.record import Change, ClusterPlan, Factor, RankPlan
from foretrain.reports.document import Cell, Message
from foretrain.reports.views.shared import verdict_id

GB = 1e9


def strategy(rank: RankPlan) -> Message:
    """'DDP'; of FSDP also whether gradients are held back."""
    return way(rank.strategy, held=not rank.syncs_each)


def way(strategy: StrategyName, *, held: bool) -> Message:
    """'FSDP2, held'."""
    name = Message(f"cluster.strategy.{strategy}")
    return Message("cluster.held", {"strategy": name}) if held else name


def refused(plan: ClusterPlan) -> list[Message]:
    """Why other strategies are not there, or not traced."""
    return [*(Message(f"error.{note.id}", note.values) for note in plan.refused), *untraced(plan)]


def untraced(plan: ClusterPlan) -> list[Message]:
    """Of each reason why a strategy was not traced one sentence."""
    reasons: dict[str, dict[str, None]] = {}
    for rank in plan.ranks:
        if rank.untraced:
            name = Message(f"cluster.strategy.{rank.strategy}").text()
            reasons.setdefault(rank.untraced, {})[name] = None
    return [Message("cluster.untraced", {"strategies": [*names], "reason": why}) for why, names in reasons.items()]


def times(factor: Factor) -> Message:
    """'1.97 times (1.83–1.97)'."""
    return Message("cluster.times", factor.model_dump())


def where(phase: PhaseMemory) -> Message:
    """In which part of a step it is highest."""
    part = phase.moment.partition(".")[0]
    return Message(f"first.where.{'evaluation' if phase.phase.startswith('evaluate') else part}")


def verdict(plan: ClusterPlan) -> Message:
    """Whether it fits, with which strategy, and why that one."""
    best = plan.best
    rank = best or plan.least
    phase, available = rank.memory.neediest, plan.one_card.available_bytes
    values = {
        "strategy": strategy(rank), "peak": phase.needed_span, "where": where(phase),
        "available": available or 0, "count": len(plan.ranks), "others": "",
    }  # fmt: skip
    if best is None:
        return Message("cluster.verdict.none", values)
    said = Message(f"cluster.verdict.{verdict_id(best.verdict, rank.memory.needed_bytes, available)}", values).text()
    return Message("first.two", {"one": said, "other": _why(plan, best)})


def _why(plan: ClusterPlan, best: RankPlan) -> Message:
    if of_one_strategy(plan.ways):
        return Message("cluster.why.asked")
    fitting = [rank for rank in plan.ranks if rank.verdict == best.verdict and rank.time]
    if len({rank.strategy for rank in fitting}) < 2:
        others = any(rank.verdict != best.verdict for rank in plan.ranks)
        return Message("cluster.why.only" if others else "cluster.why.one")
    quickest = min(fitting, key=lambda rank: rank.time.step_s.expected_s if rank.time else 0.0)
    if quickest.id == best.id:
        return Message("cluster.why.fastest")
    return Message("cluster.why.plainest", {"other": strategy(quickest)})


def pays(plan: ClusterPlan) -> Message | None:
    """Whether more cards pay; None where nobody can say."""
    best, found = plan.best, plan.pays
    if found.word == "unknown" or best is None:
        return None
    values = {"count": plan.cluster.world, "gpu": plan.cluster.gpu.name, "saved": "", "money": ""}
    if best.speed_up is None or found.saved_s is None:
        return Message("cluster.pays.needed", values)
    values |= {"times": times(best.speed_up), "saved": _saved(found.saved_s), "money": _money(plan)}
    return Message(f"cluster.{'pays_two' if plan.cluster.world == 2 else 'pays'}.{found.word}", values)


def _saved(seconds: float) -> Message:
    return Message("cluster.sooner" if seconds >= 0 else "cluster.later", {"seconds": abs(seconds)})


def _money(plan: ClusterPlan) -> Message:
    more = plan.pays.more_money
    if more is None:
        return Message("cluster.no_money")
    values = {"amount": abs(more), "currency": plan.config.currency}
    return Message("cluster.dearer" if more >= 0 else "cluster.cheaper", values)


def change(plan: ClusterPlan, made: Change) -> Message:
    """A change that helps, with what planning it says."""
    values = {**made.model_dump(), "times": times(made.speed_up), "before": plan.config.tokens_per_step}
    return Message(f"cluster.change.{made.what}", values)


def link(found: Link) -> str:
    return found.aliases[0] if found.aliases else found.name


def links(plan: ClusterPlan) -> Message:
    """What connects the cards, how fast, and what of a step waits for it."""
    cluster, best = plan.cluster, plan.best or plan.least
    waits = best.time.waiting_share if best.time else 0.0
    values = {"waits": waits, "inside": _inside(cluster), "between": _between(cluster)}
    return Message("cluster.links" if cluster.nodes == 1 else "cluster.links_between", values)


def _inside(cluster: Cluster) -> Cell:
    if cluster.per_node == 1:
        return Message("cluster.alone_in_node")
    found = cluster.link
    values = {"link": link(found), "rate": found.bytes_per_s / GB, "least": found.least_bytes_per_s / GB}
    how = "host" if found.through_host else "direct"
    return Message(f"cluster.{'link' if found.least_share else 'link_alike'}.{how}", values)


def _between(cluster: Cluster) -> Cell:
    if cluster.network is None:
        return ""
    rate = cluster.network.bytes_per_s * cluster.nics_per_node / GB
    return Message("cluster.network", {"network": link(cluster.network), "nics": cluster.nics_per_node, "rate": rate})


def assumptions(plan: ClusterPlan) -> list[Message]:
    """What nobody said and was taken, of the cards and what connects them."""
    cluster = plan.cluster
    others = [name for name in cluster.choices if name != cluster.gpu.name]
    values = {
        "link": link(cluster.link), "network": link(cluster.network) if cluster.network else "",
        "meant": cluster.meant, "gpu": cluster.gpu.name, "choices": others, "nodes": cluster.nodes,
        "per_node": cluster.per_node,
    }  # fmt: skip
    found = [Message(f"cluster.assumed.{id}", values) for id in cluster.assumed]
    nccl = (plan.best or plan.least).nccl
    found.append(Message("cluster.assumed.nccl", {"sizes": (nccl.low_bytes, nccl.high_bytes)}))
    return found
