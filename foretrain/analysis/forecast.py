"""The forecast of a run: the one that was written before it, else the same forecast made now."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.records import Record
from foretrain.config.options import StrategyName
from foretrain.predict.plan import Plan, plan
from foretrain.predict.ranks.plan import of_run
from foretrain.runs.record import RankFigures, TrainedRun
from foretrain.training.place import LEAST_S, slow


def plan_of(run: Path, record: TrainedRun) -> Plan:
    """The plan beside a run's record, or one made now: where there is none, or it is of another number of ranks. Raises
    UserError 'data.bad_plan' for a damaged one."""
    path = run / "plan.json"
    if path.is_file():
        try:
            made = Plan.from_json(read_text(path))
        except (OSError, ValidationError, ValueError, RecursionError) as error:
            raise UserError("data.bad_plan", path=str(path), reason=str(error).splitlines()[0]) from None
        if made.world == record.world:
            return made
    return plan_now(record)


def plan_now(record: TrainedRun) -> Plan:
    """The plan of a run as it trained in the end, made now."""
    config = record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype})
    made = plan(config, record.gpu, name=record.name, dataset_tokens=record.dataset.train_tokens)
    return of_run(made, record.world, record.per_node) if record.world > 1 else made


def highest(plan: Plan) -> tuple[int, int, int]:
    """(low, expected, high) of what a run measures at its highest: on a GPU the allocator's own, so without the
    context, which the forecast has in it; on a CPU the process."""
    memory = plan.memory_of("foretrain")
    low, expected, high = memory.neediest.needed_span
    if not plan.gpu.reserves:
        return low, expected, high
    held = memory.context
    return low - held.low_bytes, expected - held.expected_bytes, high - held.high_bytes


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


def ranks_of(record: TrainedRun, plan: Plan, step_s: float | None) -> RanksExplained | None:
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


def _part(figures: RankFigures, record: TrainedRun, behind: float | None) -> RankPart:
    tokens_per_s = figures.evaluated_tokens / figures.evaluated_s if figures.evaluated_s else None
    return RankPart(
        rank=figures.rank, host=figures.host, card=figures.card, allocated_bytes=figures.allocated_bytes,
        highest_bytes=figures.reserved_bytes if record.gpu.kind == "cuda" else figures.process_bytes,
        step_s=figures.step_s, data_wait_s=figures.data_wait_s, evaluates_tokens_per_s=tokens_per_s, behind=behind,
    )  # fmt: skip
