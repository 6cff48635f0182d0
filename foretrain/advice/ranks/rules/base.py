"""What one rule of the advice for several cards is: the changes it knows for a run on a cluster.

As with one card (advice/rules/base.py), a rule never computes memory or time: it says what could be changed, and the
planner what each change would take. Its texts are in the locales as rule.ID.short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from foretrain.advice.rules.base import Exactness
from foretrain.config.options import RunConfig
from foretrain.hardware.cluster import Cluster

# As of one card; other tokens: a step learns from more of them.
Learning = Exactness | Literal["other tokens"]
LEARNING: tuple[Learning, ...] = ("exact", "rounding", "other tokens", "other optimizer", "other model")
Kind = Literal["memory", "speed", "both"]


@dataclass(frozen=True)
class State:
    """A run as it stands: the config of all ranks, the cards, and the memory that other programs use on each.

    `ways`: ids of the ways to share a step (RankPlan.id) among which the quickest that fits is taken; empty: all.
    """

    config: RunConfig
    cluster: Cluster
    used_by_others_bytes: int = 0
    ways: tuple[str, ...] = ()

    def __hash__(self) -> int:  # a calibrated card holds tables, which have no hash
        where = self.cluster.text, self.cluster.link.name
        return hash((self.config, where, self.used_by_others_bytes, self.ways))


@dataclass(frozen=True)
class Change:
    """What is changed: options of the config, the cards, or how they share a step."""

    options: dict[str, Any] = field(default_factory=dict)
    cluster: Cluster | None = None
    ways: tuple[str, ...] | None = None

    def applied(self, state: State) -> State:
        return State(
            config=state.config.model_copy(update=self.options), cluster=self.cluster or state.cluster,
            used_by_others_bytes=state.used_by_others_bytes, ways=state.ways if self.ways is None else self.ways,
        )  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One thing that can be changed for several cards.

    `options`: the changes for a run that goes `way` now, the mildest first; none where there is nothing to change, with
    the reason by `idle`. `alternatives`: they are unlike each other, so each is looked at; else they are one change,
    done less or more. `buys`: it needs other hardware. `keeps_way`: cards share the step as they did. The others are as
    in advice/rules/base.py.
    """

    id: str
    kind: Kind
    learning: Learning
    reference: str
    options: Callable[[State, str], Sequence[Change]]
    idle: Callable[[State, str], str] = lambda state, way: ""
    alternatives: bool = False
    buys: bool = False
    keeps_way: bool = False
    redraws: bool = False
    toll: float = 0.0
    usual: Callable[[Sequence[Change]], int] = lambda found: 0
    place: int = 0


def loosest(found: Sequence[Learning]) -> Learning:
    """What several changes together are: as far from exact as the farthest."""
    return max(found, key=LEARNING.index)
