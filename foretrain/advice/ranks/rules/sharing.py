"""How ranks share a step: what is sharded, whether weights are gathered again, when gradients are summed."""

from collections.abc import Sequence
from typing import cast

from foretrain.advice.ranks.rules.base import Change, Rule, State
from foretrain.config.options import StrategyName
from foretrain.config.sharing import HELD, STRATEGIES, config_of_rank, sharing_problem
from foretrain.predict.speed.ranks import sharings

SOURCE = "pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


def _ways(state: State) -> list[str]:
    own = config_of_rank(state.config, state.cluster.world).gradient_accumulation_steps
    found = [sharing for sharing in sharings(state.cluster, own) if sharing_problem(state.config, sharing) is None]
    return [sharing.id for sharing in found]


def _strategy(way: str) -> StrategyName:
    return cast(StrategyName, way.removesuffix(HELD))


def _only(found: list[str]) -> Sequence[Change]:
    return [Change(ways=(way,)) for way in found]


def other_strategies(state: State, way: str) -> Sequence[Change]:
    """Each of another strategy: gradients summed as often as now where there is a choice."""
    others = [each for each in _ways(state) if _strategy(each) != _strategy(way) and not _is_alike(each, way)]
    return _only([each for each in others if each.endswith(HELD) == way.endswith(HELD) or not _shards(each)])


def _shards(way: str) -> bool:
    return STRATEGIES[_strategy(way)].shards_weights


def _is_alike(other: str, way: str) -> bool:
    """Whether they differ in resharding alone, which is a rule of its own."""
    ways = [STRATEGIES[_strategy(each)] for each in (other, way)]
    return all(each.shards_weights and not each.replicates for each in ways)


def resharding(state: State, way: str) -> Sequence[Change]:
    """FSDP2 that keeps a block's gathered weights for its backward pass, or gathers them again."""
    return _only([
        each for each in _ways(state)
        if _strategy(each) != _strategy(way) and _is_alike(each, way) and each.endswith(HELD) == way.endswith(HELD)
    ])  # fmt: skip


def holding(state: State, way: str) -> Sequence[Change]:
    """FSDP2 that sums gradients in the last micro-batch only, or in each."""
    return _only([each for each in _ways(state) if _strategy(each) == _strategy(way) and each != way])


def _holding_idle(state: State, way: str) -> str:
    """DDP holds them back by itself; with one micro-batch there is nothing to hold."""
    if not _shards(way):
        return "ddp_holds" if state.config.gradient_accumulation_steps > state.cluster.world else ""
    return "" if holding(state, way) else "one_micro_batch"


RULES = (
    Rule(
        "strategy", "both", "exact", "Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277",
        other_strategies, alternatives=True, place=30,
    ),
    Rule(
        "resharding", "both", "exact", SOURCE, resharding, place=10,
    ),
    Rule(
        "hold_gradients", "both", "exact", SOURCE, holding,
        _holding_idle, place=0,
    ),
)  # fmt: skip
