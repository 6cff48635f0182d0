"""Advice for several cards beside the rules: what other numbers of them give, changes together, DDP's buckets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretrain.advice.planner import Outcome
from foretrain.advice.record import Advice, CardCount, Idle, Way
from foretrain.advice.rules import BY_ID, ORDER
from foretrain.advice.rules.base import Change
from foretrain.advice.rules.cards import counted, moved
from foretrain.advice.search import Members, Search, Try, smallest_sets
from foretrain.base.units import MIB
from foretrain.config.sharing import STRATEGIES, Sharing, of_one_strategy
from foretrain.hardware.cluster import Cluster
from foretrain.predict.memory import estimated
from foretrain.predict.ranks import ClusterPlan, of_one_rank, speed_up
from foretrain.predict.speed.ranks import BUCKET_BYTES, rank_time, sharings


def counts(plan: ClusterPlan, search: Search) -> tuple[CardCount, ...]:
    """One card first, then the numbers that are tried, with that of now among them. Shared in the way that is asked
    for, else the fastest that fits."""
    one = plan.one_card
    single = plan.cluster.model_copy(update={"nodes": 1, "per_node": 1, "network": None})
    memory, timing = one.memory_of("foretrain"), one.timing_of("foretrain")
    alone = Outcome(replace(search.state, cluster=None), memory, one.available_bytes, lambda: timing)
    found = [_count(plan, search, alone, single)]
    for cluster in sorted([plan.cluster, *counted(plan.cluster)], key=lambda each: each.world):
        change = None if cluster is plan.cluster else moved(search.state, cluster)
        outcome = search.planner.outcome(change.applied(search.state)) if change else None
        found.append(_count(plan, search, search.base if cluster is plan.cluster else outcome, cluster))
    return tuple(found)


def _count(plan: ClusterPlan, search: Search, outcome: Outcome | None, cluster: Cluster) -> CardCount:
    where: dict[str, Any] = {"cards": cluster.world, "nodes": cluster.nodes, "text": cluster.text}
    config, alone = outcome.state.config if outcome else plan.config, plan.one_card.timing_of("foretrain")
    factor = speed_up(alone.step_s, outcome.timing.step_s) if alone and outcome and outcome.timing else None
    return CardCount(
        **where, way=Way.of(outcome.rank) if outcome and outcome.rank else None, batch_size=config.batch_size,
        accumulation=config.gradient_accumulation_steps, effect=search.effect(outcome) if outcome else None,
        speed_up=factor, efficiency=factor.expected / cluster.world if factor else None,
    )  # fmt: skip


def together(search: Search, found: Sequence[Try]) -> list[Try]:
    """Sets of changes that fit, each of which saves memory alone. None where all do not fit."""
    saving = [each for each in found if search.saves(each.outcome) and not each.buys(search.state)]
    saving.sort(key=search.price, reverse=True)
    parts = {each.rules[0]: each for each in saving}  # of one rule the cheapest

    def kept(members: Members, cut: bool = False) -> Try | None:
        """Several changes at once. Options that a single one left as they were stay as they are."""
        base, update, ways = search.state, {}, search.state.ways
        for part in (parts[rule] for rule in ORDER if rule in members):
            update |= part.options
            ways = part.state.ways if part.state.ways != base.ways and not BY_ID[part.rules[0]].keeps_way else ways
        made = search.made(members, Change(update, ways=ways), base)
        return made if made and made.fits else None

    return smallest_sets(search, [tuple(parts)], kept) if len(parts) > 1 and kept(tuple(parts)) else []


def options_of(plan: ClusterPlan, change: Advice) -> dict[str, Any]:
    """Return the options that make a change, with the way to share a step where a plan could pick another by itself."""
    assert change.shared is not None
    values: dict[str, Any] = {setting.option: setting.after for setting in change.settings}
    now, way = plan.best or plan.least, change.shared.way
    if way.id == now.id and not any(BY_ID[rule].keeps_way for rule in change.rules if rule in BY_ID):
        return values
    if way.strategy != now.strategy or not of_one_strategy(plan.ways):
        values["strategy"] = way.strategy
    if STRATEGIES[way.strategy].shards_weights and plan.ways != (way.id,):
        values["hold_gradients"] = way.holds_gradients
    return values


# What DDP's buckets bring: gradients that are views of them, which foretrain always has, and other sizes of them.

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
    now, without = (max(phase.allocated_bytes for phase in estimate.memory.phases) for estimate in ledgers)
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
