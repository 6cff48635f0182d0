"""Advice for several cards as records: what other numbers of cards would give, and what to change with these.

Texts are ids, as in advice/record.py. Bytes are of one card, seconds and money of all.
"""

from foretrain.advice.ranks.rules.base import Learning
from foretrain.advice.record import Effect, Idle, Setting
from foretrain.advice.rules.base import Goal
from foretrain.base.records import Record
from foretrain.config.sharing import StrategyName, way_id
from foretrain.hardware.cluster import Cluster
from foretrain.predict.ranks.record import Factor

SCHEMA = "foretrain.cluster-advice/1"


class Way(Record):
    """How cards share a step; of FSDP2 also whether gradients are summed in the last micro-batch only."""

    strategy: StrategyName
    holds_gradients: bool

    @property
    def id(self) -> str:
        return way_id(self.strategy, syncs_each=not self.holds_gradients)


class CardCount(Record):
    """The same run on another number of cards, or on as many as now. `way`: the quickest that fits there, None on one.

    `batch_size`, `accumulation`: of all cards together, for the same tokens a step. `effect`: None where these cannot
    be divided among so many cards. `speed_up`: against one card; `efficiency`: what of the number of cards that is.
    """

    cards: int
    nodes: int
    text: str
    way: Way | None
    batch_size: int
    accumulation: int
    effect: Effect | None
    speed_up: Factor | None
    efficiency: float | None


class ClusterChange(Record):
    """One change, or a few together. `effect.slower` is of the time for a token, which is that of the step where
    its tokens stay. `buys`: it needs other hardware than was named."""

    rules: tuple[str, ...]
    settings: tuple[Setting, ...]
    cards: int
    nodes: int
    text: str
    link: str
    way: Way
    learning: Learning
    tokens_per_step: int
    effect: Effect
    speed_up: Factor | None
    buys: bool
    price: float


class ClusterAdvice(Record):
    """All advice for a run on several cards, the best first.

    `way`: how they share a step now, or would where nothing fits. `counts`: the same run on 1, 2, 4, 8 cards.
    `partial`: what saves memory, but not enough alone; `useless`: what buys nothing here. `planned`: estimates that it
    took.
    """

    name: str
    goal: Goal
    goal_given: bool
    cluster: Cluster
    way: Way
    tokens_per_step: int
    now: Effect
    counts: tuple[CardCount, ...]
    advised: tuple[ClusterChange, ...]
    partial: tuple[ClusterChange, ...]
    useless: tuple[Idle, ...]
    planned: int
    nothing_fits: bool = False

    @property
    def alone(self) -> CardCount:
        return self.counts[0]

    def keeps_cards(self, change: ClusterChange) -> bool:
        """Whether a change is one of the config alone."""
        return change.text == self.cluster.text and change.link == self.cluster.link.name

    def top(self, count: int) -> "ClusterAdvice":
        """The same with the first of each kind only."""
        return self.model_copy(update={"advised": self.advised[:count], "partial": self.partial[:count]})
