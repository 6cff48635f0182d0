"""Advice as records. Texts are ids (rule.ID.*, idle.ID); bytes, seconds, shares (0.05 is 5%)."""

from typing import Any

from pydantic import Field

from foretrain.advice.planner import Outcome
from foretrain.advice.rules.base import Exactness, Goal
from foretrain.base.records import Record
from foretrain.config.finetune.options import FineTune
from foretrain.config.options import RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.sharing import StrategyName, way_id
from foretrain.hardware.cluster import Cluster
from foretrain.predict.memory import RunMemory, Verdict
from foretrain.predict.ranks import Factor, RankPlan
from foretrain.predict.spec import StepName

SCHEMA = "foretrain.advice/1"


class Setting(Record):
    """One option with its value before and after. `ours`: nanoGPT has no such option."""

    option: str
    before: Any
    after: Any
    ours: bool


def to_set(found: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Those that somebody has to set: GPT-2's weights bring their own shape."""
    brings = GPT2_SHAPES.get(next((str(s.after) for s in found if s.option == "init_from"), ""), {})
    return tuple(setting for setting in found if setting.option not in brings)


def with_settings(config: RunConfig, found: tuple[Setting, ...]) -> RunConfig:
    update: dict[str, Any] = {setting.option: setting.after for setting in found}
    return config.model_copy(update=update)


class PhaseEffect(Record):
    """What a phase is expected to need, and how much less than now; below zero it is more."""

    phase: str
    needed_bytes: int
    saved_bytes: int


def phase_effects(now: RunMemory, then: RunMemory) -> tuple[PhaseEffect, ...]:
    before = {phase.phase: phase.needed_expected_bytes for phase in now.phases}
    return tuple(
        PhaseEffect(
            phase=p.phase, needed_bytes=p.needed_expected_bytes,
            saved_bytes=before.get(p.phase, p.needed_expected_bytes) - p.needed_expected_bytes,
        )
        for p in then.phases
    )  # fmt: skip


def slowdown(now: Outcome, then: Outcome) -> float | None:
    """Return the share of time that a run then takes more; for a token where steps may have other tokens."""
    old, new = now.timing, then.timing
    if not old or not new:
        return None
    by_token = now.rank or isinstance(now.state.config, FineTune)
    return (old.tokens_per_s / new.tokens_per_s if by_token else new.step_s.expected_s / old.step_s.expected_s) - 1


class Effect(Record):
    """What a run takes in one state, beside the run as it is now; None where the card's speed is unknown.

    Bytes are of the worst phase. `slower`: the step's time over that of now, minus 1 (below zero it is faster);
    `longer`: of the whole run. `allocated_bytes`: the most that tensors take.
    """

    needed_bytes: int
    saved_bytes: int
    allocated_bytes: int
    available_bytes: int | None
    verdict: Verdict | None
    phases: tuple[PhaseEffect, ...]
    step_s: float | None
    total_s: float | None
    slower: float | None
    longer: float | None
    money: float | None
    source: str

    @classmethod
    def of(cls, now: Outcome, then: Outcome) -> "Effect":
        old, new = now.timing, then.timing
        slower, longer = slowdown(now, then), None
        if old and new:
            longer = new.length_s.expected_s / old.length_s.expected_s - 1
        return cls(
            needed_bytes=then.needed_bytes, saved_bytes=now.needed_bytes - then.needed_bytes,
            allocated_bytes=then.memory.worst.allocated_bytes, available_bytes=then.available_bytes,
            verdict=then.verdict, phases=phase_effects(now.memory, then.memory), step_s=then.step_s,
            total_s=then.total_s, slower=slower, longer=longer, money=then.money, source=then.memory.source,
        )  # fmt: skip


class Estimate(Record):
    """A loss by a published scaling law (predict/scaling.py), now and then, in nats per token."""

    loss_now: float
    loss_then: float
    law: str
    steps_then: int
    tokens_now: int
    tokens_then: int


class Confirmation(Record):
    """What a trace's replay says of an advice: traced. `reason`: why it cannot be traced."""

    verdict: Verdict | None = None
    needed_bytes: int | None = None
    saved_bytes: int | None = None
    holds: bool = False
    reason: str = ""


class Way(Record):
    """How cards share a step; of FSDP2 also whether gradients are summed in the last micro-batch only."""

    strategy: StrategyName
    holds_gradients: bool

    @classmethod
    def of(cls, rank: RankPlan) -> "Way":
        return cls(strategy=rank.strategy, holds_gradients=not rank.syncs_each)

    @property
    def id(self) -> str:
        return way_id(self.strategy, syncs_each=not self.holds_gradients)


class CardCount(Record):
    """The same run on another number of cards, or on as many as now. `way`: the fastest that fits there, None on one.

    `batch_size`, `accumulation`: of all cards together, for the same tokens per step. `effect`: None where these cannot
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


class Cards(Record):
    """The cards of a change, and how they share the step. `buys`: it needs other hardware than was named."""

    cards: int
    nodes: int
    text: str
    link: str
    way: Way
    speed_up: Factor | None
    buys: bool


class Advice(Record):
    """One change, or a few together.

    `rules`: in the order in which they are applied. `step`, `gpu`, `used_by_others_bytes`: whose step runs then, where.
    `price`: its rank (docs/advice.md). `shared`: of several cards; `effect.slower` is then for a token.
    """

    rules: tuple[str, ...]
    settings: tuple[Setting, ...]
    step: StepName | None
    gpu: str
    used_by_others_bytes: int
    exactness: Exactness
    tokens_per_step: int
    keeps_tokens_per_step: bool
    effect: Effect
    price: float
    estimate: Estimate | None = None
    confirmation: Confirmation | None = None
    shared: Cards | None = None

    @property
    def trainer(self) -> StepName:
        """Whose step runs then; of a pretraining run."""
        assert self.step is not None
        return self.step

    @property
    def options(self) -> dict[str, Any]:
        return {setting.option: setting.after for setting in self.settings}

    @property
    def learns_otherwise(self) -> bool:
        return self.exactness not in ("exact", "rounding")


class Idle(Record):
    """A rule that does not help here, with the reason's id and its values."""

    rule: str
    reason: str
    values: dict[str, Any] = Field(default_factory=dict)


class Advices(Record):
    """All advice for one run, the best first. `partial`: what saves memory, but not enough alone; `useless`: does
    not help.

    `planned`: estimates that it took. Of several cards `way`: how they share a step; `counts`: on 1, 2, 4, 8 of them.
    """

    name: str
    goal: Goal
    goal_given: bool
    step: StepName | None
    gpu: str
    used_by_others_bytes: int
    tokens_per_step: int
    now: Effect
    advised: tuple[Advice, ...]
    partial: tuple[Advice, ...]
    useless: tuple[Idle, ...]
    planned: int
    now_confirmation: Confirmation | None = None
    nothing_fits: bool = False
    cluster: Cluster | None = None
    way: Way | None = None
    counts: tuple[CardCount, ...] = ()

    @property
    def trainer(self) -> StepName:
        """Whose step runs now; of a pretraining run."""
        assert self.step is not None
        return self.step

    @property
    def is_for_a_token(self) -> bool:
        """Return whether times are compared for a token, as steps may have more of them; else for a step."""
        return self.step is None or self.cluster is not None

    def keeps_cards(self, advice: Advice) -> bool:
        cards, now = advice.shared, self.cluster
        return cards is None or now is None or (cards.text, cards.link) == (now.text, now.link.name)

    def top(self, count: int) -> "Advices":
        return self.model_copy(update={"advised": self.advised[:count], "partial": self.partial[:count]})
