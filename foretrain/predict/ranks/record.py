"""What is known of a run on several cards: a row for each way to share it, and whether the cards pay."""

from typing import Literal

from foretrain.base.records import Note, Record
from foretrain.config.options import RunConfig
from foretrain.hardware.cluster import Cluster
from foretrain.model.ranks.sharing import StrategyName, way_id
from foretrain.predict.memory import StepMemory, Verdict, worst_verdict
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.ranks.nccl import NcclMemory
from foretrain.predict.speed.ranks import RankTime

SCHEMA = "foretrain.cluster/1"

# needed: one card cannot run it. pays, link_decides (a poor link makes it slower than one card), little, no: less than
# 1.1 times as fast. unknown: the card's speed is, or nothing fits.
Word = Literal["needed", "pays", "link_decides", "little", "no", "unknown"]
What = Literal["micro_batch", "accumulation", "nvlink"]


class Factor(Record):
    """How many times as much, with its honest range."""

    low: float
    expected: float
    high: float


class RankPlan(Record):
    """One way to share the step. `memory` is a rank's, NCCL's own in what it needs; times, energy and money are of all
    cards. `syncs_each`: FSDP sums gradients in every micro-batch, else in the last one.

    `speed_up`: how many times as fast as one card; `efficiency`: what of the cards' number that is.
    `traced_ranks`: whose steps were traced, where its memory is; `untraced`: why it is not, where it was to be.
    """

    strategy: StrategyName
    syncs_each: bool
    memory: StepMemory
    nccl: NcclMemory
    time: RankTime | None
    timing: Timing | None
    speed_up: Factor | None
    efficiency: float | None
    traced_ranks: tuple[int, ...] = ()
    untraced: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits, by its worst phase."""
        return worst_verdict(self.memory)

    @property
    def id(self) -> str:
        """The strategy, and whether gradients are held back."""
        return way_id(self.strategy, syncs_each=self.syncs_each)


class Change(Record):
    """A change that was planned: what is changed, to what, and how much faster than one card that runs the same tokens.

    `batch_size`, `accumulation`: of all ranks, as in the config; `link`: by name.
    """

    what: What
    batch_size: int
    accumulation: int
    tokens_per_step: int
    link: str
    strategy: StrategyName
    speed_up: Factor
    efficiency: float


class Pays(Record):
    """What the cards bring against one. `saved_s`: time that the run takes less; `more_money`: what it costs more, in
    the currency, of electricity or rent.

    `changes`: where they do not pay, what would help, with the first number that makes them pay, or the best tried.
    """

    word: Word
    saved_s: float | None = None
    more_money: float | None = None
    changes: tuple[Change, ...] = ()


class ClusterPlan(Record):
    """The forecast of one config on several cards. `one_card`: the same run on one of them.

    `ranks`: every way to share it that can run, the plainest first; `refused`: why others are not there. `chosen`: the
    `id` of the way that is meant, None where none fits; `ways`: ids of those that the user's options leave, empty where
    they leave all.
    """

    name: str
    cluster: Cluster
    one_card: Plan
    micro_batches: int  # of one rank in a step
    ranks: tuple[RankPlan, ...]
    refused: tuple[Note, ...] = ()
    chosen: str | None = None
    ways: tuple[str, ...] = ()
    pays: Pays = Pays(word="unknown")

    @property
    def config(self) -> RunConfig:
        """The config; its tokens of a step are those of all ranks together."""
        return self.one_card.config

    def options_of(self, rank: RankPlan) -> tuple[str, ...]:
        """The options of a run that shares its step so, where the config does not say them."""
        strategy = () if rank.strategy == self.config.strategy else (f"--strategy={rank.strategy}",)
        held = () if rank.syncs_each or self.config.hold_gradients else ("--hold_gradients=true",)
        return (*strategy, *held)

    @property
    def best(self) -> RankPlan | None:
        """The way that is meant; None where none fits."""
        return next((rank for rank in self.ranks if rank.id == self.chosen), None)

    @property
    def least(self) -> RankPlan:
        """The way that needs least memory; of several the quickest."""

        def order(rank: RankPlan) -> tuple[int, float]:
            return rank.memory.needed_bytes, rank.time.step_s.expected_s if rank.time else 0.0

        return min(self.ranks, key=order)

    @property
    def verdict(self) -> Verdict | None:
        """Of the way that is meant, else of the one that needs least."""
        return (self.best or self.least).verdict
