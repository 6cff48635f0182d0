"""What the ranks of a run measured, each beside the forecast of the one with the most to hold."""

from typing import Literal

from foretrain.analysis.forecast import highest
from foretrain.base.records import Record
from foretrain.config.options import StrategyName
from foretrain.predict.plan import Plan
from foretrain.training.ranks.place import LEAST_S, slow
from foretrain.training.store import RankFigures, RunRecord


class RankPart(Record):
    """One rank. `highest_bytes`: what its allocator reserved on a card, its process on a CPU.

    `evaluates_tokens_per_s`: of its part of an evaluation, in which it does not wait for other ranks but with FSDP;
    `behind`: by what share it is slower there than the median, where all wait for it.
    """

    rank: int
    host: str
    card: str
    allocated_bytes: int | None
    highest_bytes: int | None
    step_s: float | None
    data_wait_s: float | None
    evaluates_tokens_per_s: float | None
    behind: float | None = None


class Stretch(Record):
    """From which step on so many ranks trained."""

    first_step: int
    world: int


class RanksExplained(Record):
    """A run on several ranks. `devices`: cards; ranks on a CPU share their machine's. Speeds are of the last stretch.

    The forecast is of the rank with the most to hold; `low_bytes` to `high_bytes`: of `highest_bytes`, which is
    `what`. `most`: the rank that measured most. `told`: whether evaluations took long enough to tell who is slow.
    """

    world: int
    devices: int
    machines: int
    strategy: StrategyName
    tokens_per_s: float | None
    predicted_tokens_per_s: float | None
    predicted_allocated_bytes: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    what: Literal["reserved", "process"]
    parts: tuple[RankPart, ...]
    most: int | None
    slow: tuple[int, ...]
    told: bool
    stretches: tuple[Stretch, ...] = ()

    @property
    def card_tokens_per_s(self) -> float | None:
        """Of each card; None on a CPU, which ranks share."""
        return self.tokens_per_s / self.devices if self.tokens_per_s and self.devices == self.world else None


def ranks_of(record: RunRecord, plan: Plan, step_s: float | None) -> RanksExplained | None:
    """What is known of the ranks of a run; None of a run that one rank has always trained. `step_s`: steady."""
    if record.world == 1 and not record.worlds:
        return None
    behind = {figures.rank: share for figures, share in slow(record.ranks)}
    parts = tuple(_part(figures, record, behind.get(figures.rank)) for figures in record.ranks)
    most = max(parts, key=lambda part: (part.highest_bytes or 0, part.allocated_bytes or 0), default=None)
    low, expected, high = highest(plan)
    return RanksExplained(
        world=record.world, devices=record.devices, machines=max(1, record.world // record.per_node),
        strategy=record.config.strategy, tokens_per_s=record.config.tokens_per_step / step_s if step_s else None,
        predicted_tokens_per_s=plan.foretrain_timing.tokens_per_s if plan.foretrain_timing else None,
        predicted_allocated_bytes=plan.memory_of("foretrain").worst.allocated_bytes, predicted_bytes=expected,
        low_bytes=low, high_bytes=high, what="reserved" if record.gpu.kind == "cuda" else "process", parts=parts,
        most=most.rank if most else None, slow=tuple(behind),
        told=max((figures.evaluated_s for figures in record.ranks), default=0.0) >= LEAST_S,
        stretches=tuple(Stretch(first_step=first, world=world) for first, world in record.worlds),
    )  # fmt: skip


def _part(figures: RankFigures, record: RunRecord, behind: float | None) -> RankPart:
    tokens_per_s = figures.evaluated_tokens / figures.evaluated_s if figures.evaluated_s else None
    return RankPart(
        rank=figures.rank, host=figures.host, card=figures.card, allocated_bytes=figures.allocated_bytes,
        highest_bytes=figures.reserved_bytes if record.gpu.kind == "cuda" else figures.process_bytes,
        step_s=figures.step_s, data_wait_s=figures.data_wait_s, evaluates_tokens_per_s=tokens_per_s, behind=behind,
    )  # fmt: skip
