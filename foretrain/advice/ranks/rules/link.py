"""What connects the cards."""

from collections.abc import Sequence

from foretrain.advice.ranks.rules.base import Change, Rule, State
from foretrain.hardware.cluster import BRIDGED
from foretrain.hardware.links import nvlink_of


def nvlink(state: State, way: str) -> Sequence[Change]:
    """NVLink where these cards can have it and do not."""
    found = state.cluster.nvlink_to_add
    return [] if found is None else [Change(cluster=state.cluster.but(found))]


def _idle(state: State, way: str) -> str:
    found, cluster = nvlink_of(state.cluster.gpu.name), state.cluster
    if found is None:
        return "no_nvlink"
    if found == cluster.link:
        return "already_on"
    return "bridge_of_two" if found.joins and cluster.per_node > BRIDGED else ""


RULES = (
    Rule("nvlink", "speed", "exact", "foretrain/hardware/links.toml", nvlink, _idle, buys=True, place=70),
)  # fmt: skip
