"""More cards of the same kind, or fewer."""

from collections.abc import Sequence

from foretrain.advice.ranks.rules.base import Change, Rule, State
from foretrain.config.microbatches import split_of
from foretrain.config.sharing import recut
from foretrain.hardware.cluster import A_MACHINE, BRIDGED, Cluster
from foretrain.hardware.links import link_of

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
    """The same run on other cards, shared in the way that is asked for: the same tokens a step, in smaller
    micro-batches where they have to be. None where its sequences cannot be divided."""
    config = state.config
    if config.gradient_accumulation_steps % cluster.world:
        config = recut(config, cluster.world)
    if config is None:
        return None
    ways = tuple(each for each in state.ways if cluster.nodes > 1 or not each.startswith("hsdp"))
    return Change(split_of(config), cluster=cluster, ways=ways)


def _options(state: State, way: str) -> Sequence[Change]:
    found = (moved(state, cluster) for cluster in counted(state.cluster))
    return [change for change in found if change is not None]


RULES = (
    Rule(
        "cards", "both", "exact", "docs/several-cards.md", _options, alternatives=True, buys=True, redraws=True,
        place=80,
    ),
)  # fmt: skip
