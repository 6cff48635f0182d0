"""Rules of several cards: how many, what connects them, how they share a step, and what a step learns from."""

from collections.abc import Sequence
from typing import cast

from foretrain.advice.rules.base import Change, Rule, State
from foretrain.advice.rules.batch import MOST_TIMES
from foretrain.config.microbatches import accumulations, split_of
from foretrain.config.options import StrategyName
from foretrain.config.sharing import HELD, STRATEGIES, config_of_rank, recut, sharing_problem
from foretrain.hardware.cluster import A_MACHINE, BRIDGED, Cluster
from foretrain.hardware.links import link_of, nvlink_of
from foretrain.predict.speed.ranks import sharings

COUNTS = 2, 4, 8
NODES = 1, 2, 4, 8


def counted(now: Cluster) -> list[Cluster]:
    """The same cards in other numbers, the fewest first: up to a machine of eight; of several nodes, other numbers of
    them. What connects them stays where it can: an NVLink bridge joins two cards only."""
    if now.nodes > 1:
        return [_of_nodes(now, nodes) for nodes in NODES if nodes != now.nodes and nodes * now.per_node > 1]
    found = [_in_a_node(now, count) for count in COUNTS if count != now.per_node]
    return [each for each in found if each.per_node <= max(A_MACHINE, now.per_node)]


def _in_a_node(now: Cluster, count: int) -> Cluster:
    link = link_of(now.gpu.name).link if now.link.joins and count > BRIDGED else now.link
    return now.model_copy(update={"per_node": count, "link": link, "nics_per_node": min(now.nics_per_node, count)})


def _of_nodes(now: Cluster, nodes: int) -> Cluster:
    return now.model_copy(update={"nodes": nodes, "network": now.network if nodes > 1 else None})


def moved(state: State, cluster: Cluster) -> Change | None:
    """Return the same run, and tokens per step, on other cards; None where its sequences cannot be divided."""
    config = state.config
    if config.gradient_accumulation_steps % cluster.world:
        config = recut(config, cluster.world)
    if config is None:
        return None
    ways = tuple(each for each in state.ways if cluster.nodes > 1 or not each.startswith("hsdp"))
    return Change(split_of(config), cluster=cluster, ways=ways)


def other_counts(state: State) -> Sequence[Change]:
    found = (moved(state, cluster) for cluster in counted(_cluster(state)))
    return [change for change in found if change is not None]


def _cluster(state: State) -> Cluster:
    assert state.cluster is not None
    return state.cluster


def accumulation(state: State) -> Sequence[Change]:
    """Twice, four times, … as many micro-batches, and so tokens per step: gradients are summed as much less often."""
    return [Change({**more}) for more in accumulations(state.config, MOST_TIMES)]


def nvlink(state: State) -> Sequence[Change]:
    """NVLink where these cards can have it and do not."""
    cluster = _cluster(state)
    found = cluster.nvlink_to_add
    return [] if found is None else [Change(cluster=cluster.but(found))]


def _nvlink_idle(state: State) -> str:
    found, cluster = nvlink_of(state.gpu.name), _cluster(state)
    if found is None:
        return "no_nvlink"
    if found == cluster.link:
        return "already_on"
    return "bridge_of_two" if found.joins and cluster.per_node > BRIDGED else ""


def _ways(state: State) -> list[str]:
    own = config_of_rank(state.config, state.world).gradient_accumulation_steps
    found = [sharing for sharing in sharings(_cluster(state), own) if sharing_problem(state.config, sharing) is None]
    return [sharing.id for sharing in found]


def _strategy(way: str) -> StrategyName:
    return cast(StrategyName, way.removesuffix(HELD))


def _only(found: list[str]) -> Sequence[Change]:
    return [Change(ways=(way,)) for way in found]


def other_strategies(state: State) -> Sequence[Change]:
    """Each of another strategy: gradients summed as often as now where there is a choice."""
    others = [each for each in _other_strategies(state) if not _is_alike(each, state.way)]
    return _only([each for each in others if each.endswith(HELD) == state.way.endswith(HELD) or not _shards(each)])


def _other_strategies(state: State) -> list[str]:
    return [each for each in _ways(state) if _strategy(each) != _strategy(state.way)]


def _shards(way: str) -> bool:
    return STRATEGIES[_strategy(way)].shards_weights


def _is_alike(other: str, way: str) -> bool:
    """Whether they differ in resharding alone, which is a rule of its own."""
    ways = [STRATEGIES[_strategy(each)] for each in (other, way)]
    return all(each.shards_weights and not each.replicates for each in ways)


def resharding(state: State) -> Sequence[Change]:
    """FSDP2 that keeps a block's gathered weights for its backward pass, or gathers them again."""
    alike = [each for each in _other_strategies(state) if _is_alike(each, state.way)]
    return _only([each for each in alike if each.endswith(HELD) == state.way.endswith(HELD)])


def holding(state: State) -> Sequence[Change]:
    """FSDP2 that sums gradients in the last micro-batch only, or in each."""
    return _only([each for each in _ways(state) if _strategy(each) == _strategy(state.way) and each != state.way])


def _holding_idle(state: State) -> str:
    """DDP holds them back by itself; with one micro-batch there is nothing to hold."""
    if not _shards(state.way):
        return "ddp_holds" if state.config.gradient_accumulation_steps > state.world else ""
    return "" if holding(state) else "one_micro_batch"


SOURCE = "pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
SHARING = (
    Rule(
        "hold_gradients", "both", "exact", SOURCE, holding, _holding_idle, several=True,
    ),
    Rule("resharding", "both", "exact", SOURCE, resharding, several=True),
)  # fmt: skip
CARDS = (
    Rule(
        "strategy", "both", "exact", "Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277",
        other_strategies, several=True, alternatives=True,
    ),
    Rule(
        "more_accumulation", "speed", "other tokens", "docs/several-cards.md; arXiv:1812.06162", accumulation,
        several=True,
    ),
    Rule(
        "nvlink", "speed", "exact", "foretrain/hardware/links.toml", nvlink, _nvlink_idle, several=True, buys=True,
    ),
    Rule(
        "cards", "both", "exact", "docs/several-cards.md", other_counts, several=True, alternatives=True, buys=True,
        redraws=True,
    ),
)  # fmt: skip
