"""The same run on one card, and on other numbers of cards: would fewer do, what would more give."""

from typing import Any

from foretrain.advice.ranks.effects import effect, way_of
from foretrain.advice.ranks.planner import Outcome, Planner
from foretrain.advice.ranks.record import CardCount
from foretrain.advice.ranks.rules.base import State
from foretrain.advice.ranks.rules.cards import counted, moved
from foretrain.hardware.cluster import Cluster
from foretrain.predict.ranks.plan import speed_up
from foretrain.predict.ranks.record import ClusterPlan


def counts(plan: ClusterPlan, now: Outcome, planner: Planner) -> tuple[CardCount, ...]:
    """One card first, then the numbers that are tried, with that of now among them."""
    one = plan.one_card
    alone = Outcome(now.state, one.memory_of("foretrain"), one.timing_of("foretrain"), one.available_bytes)
    found = [_count(plan, now, alone, plan.cluster.model_copy(update={"nodes": 1, "per_node": 1, "network": None}))]
    for cluster in sorted([plan.cluster, *counted(plan.cluster)], key=lambda each: each.world):
        outcome = now if cluster is plan.cluster else _on(now.state, cluster, planner)
        found.append(_count(plan, now, outcome, cluster))
    return tuple(found)


def _on(state: State, cluster: Cluster, planner: Planner) -> Outcome | None:
    """What the same run takes there, shared in the way that is asked for, else the quickest that fits."""
    change = moved(state, cluster)
    return planner.outcome(change.applied(state)) if change else None


def _count(plan: ClusterPlan, now: Outcome, outcome: Outcome | None, cluster: Cluster) -> CardCount:
    where: dict[str, Any] = {"cards": cluster.world, "nodes": cluster.nodes, "text": cluster.text}
    if outcome is None:
        config = plan.config
        split: dict[str, Any] = {"batch_size": config.batch_size, "accumulation": config.gradient_accumulation_steps}
        return CardCount(**where, **split, way=None, effect=None, speed_up=None, efficiency=None)
    config, alone = outcome.state.config, plan.one_card.timing_of("foretrain")
    factor = speed_up(alone.step_s, outcome.timing.step_s) if alone and outcome.timing else None
    return CardCount(
        **where, way=way_of(outcome) if outcome.rank else None, batch_size=config.batch_size,
        accumulation=config.gradient_accumulation_steps, effect=effect(now, outcome), speed_up=factor,
        efficiency=factor.expected / cluster.world if factor else None,
    )  # fmt: skip
