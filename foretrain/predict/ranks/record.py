"""What is known of a run on several cards: a row for each way to share it, and whether the cards pay."""

from typing import Literal

from foretrain.base.records import Note, Record
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing, StrategyName, way_id
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.devices import Context
from foretrain.predict.memory import StepMemory, Verdict, worst_verdict
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.speed.ranks import RankTime

# What NCCL takes on a card beside PyTorch's allocator: buffers of its channels, for each communicator.
#
# A range that others have published; nothing of it is measured here. It hangs on the link, since NCCL opens as many
# channels as the link can feed, on NCCL's version, and on which collectives ran:
#
# * cards on PCIe: 0.3 to 0.7 GB (pairs; NVIDIA/nccl#964 has 544 MB for two ranks, 688 MB for more). * NVLink: 544 MB
# for two A100 (#964) to 1.6 GB (#864). * NVLink whose switch sums (NVLS): 1.06 GB on eight H100, 4.34 GB after the
# first all-to-all (#1685); the early records   of modded-nanogpt had about 3.4 to 4.3 GB beside model, buckets and
# context before their first step.
#
# Expected is the middle: nobody knows better.

PCIE_BYTES = 300_000_000, 700_000_000
NVLINK_BYTES, SWITCH_BYTES = (544_000_000, 1_600_000_000), (1_060_000_000, 4_340_000_000)
LEAST_SWITCHED = 3  # ranks: two have nothing to gain from a sum in the switch


class NcclMemory(Record):
    """Bytes of all communicators of a rank. An estimated range: published, not measured on these cards."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int

    @classmethod
    def of(cls, cluster: Cluster, sharing: Sharing) -> "NcclMemory":
        """One communicator for all ranks; HSDP has one more between nodes, which is as large at most."""
        low, high = PCIE_BYTES
        if cluster.link.kind == "nvlink":
            switched = cluster.link.switch_share and cluster.per_node >= LEAST_SWITCHED
            low, high = SWITCH_BYTES if switched else NVLINK_BYTES
        most = 2 if sharing.way.replicates else 1
        return cls(low_bytes=low, expected_bytes=(low + most * high) // 2, high_bytes=most * high)

    def beside(self, context: Context) -> Context:
        """All that a rank takes on a card beside the allocator: its context, and NCCL's memory."""
        names = ("low_bytes", "expected_bytes", "high_bytes")
        return context.model_copy(update={name: getattr(context, name) + getattr(self, name) for name in names})


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
    def needed_bytes(self) -> int:
        return (self.best or self.least).memory.needed_bytes

    @property
    def available_bytes(self) -> int | None:
        return self.one_card.available_bytes

    @property
    def timing(self) -> Timing | None:
        return (self.best or self.least).timing

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.one_card.notes

    @property
    def verdict(self) -> Verdict | None:
        """Of the way that is meant, else of the one that needs least."""
        return (self.best or self.least).verdict
