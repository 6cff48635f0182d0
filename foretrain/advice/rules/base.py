"""What a rule of the advisor is: changes for a config on a card, smallest first, without figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from foretrain.config.finetune.options import FineTune
from foretrain.config.inference import Inference
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cluster import Cluster
from foretrain.model.techniques.technique import Technique
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.spec import StepName, StepSpec

# exact: the same maths, other order of sums at most; rounding: the same in expectation (other half-precision rounding,
# other random draws); other tokens: a step learns from more of them; other optimizer: other updates; other model:
# another model or context is trained.
Exactness = Literal["exact", "rounding", "other tokens", "other optimizer", "other model"]
EXACTNESS: tuple[Exactness, ...] = get_args(Exactness)
Goal = Literal["fit", "speed", "cost", "quality"]
# Rules of one card that are not of a config of foretrain's step, or that several cards cannot follow.
OF_ONE_CARD = ("foretrain_step", "free_others", "optimizer_offload")
Kind = Literal["memory", "speed", "both", "model", "card", "folklore", "quality"]


@dataclass(frozen=True)
class State:
    """A run as it stands: the config, the card, whose step, and the memory that other programs use there.

    `cluster`: the cards that share its step, None on one. `ways`: ids of the ways to share it (RankPlan.id) among which
    the fastest that fits is taken, all where empty; `way`: the one that the run goes now.
    """

    config: RunConfig
    gpu: Gpu
    step: StepName
    used_by_others_bytes: int
    cluster: Cluster | None = None
    ways: tuple[str, ...] = ()
    way: str = field(default="", compare=False)

    def __hash__(self) -> int:  # a calibrated card holds tables, which have no hash
        cards = (self.cluster.text, self.cluster.link.name, self.ways) if self.cluster else self.gpu.name
        return hash((self.config, cards, self.step, self.used_by_others_bytes))

    @property
    def world(self) -> int:
        return self.cluster.world if self.cluster else 1

    @property
    def tokens_per_step(self) -> int:
        return self.config.tokens_per_step

    @cached_property
    def spec(self) -> StepSpec:
        return StepSpec.of(self.config, self.gpu, self.step)

    @property
    def dtype(self) -> Dtype:
        return self.spec.dtype

    @property
    def half(self) -> bool:
        return self.spec.half

    @property
    def effective(self) -> RunConfig:
        return self.spec.config


@dataclass(frozen=True)
class PlannedState:
    """A fine-tuning run, or a model that generates text, as it stands: its options, and the plan that rules change."""

    plan: FineTunePlan | InferencePlan
    config: FineTune | Inference
    step = None

    @property
    def gpu(self) -> Gpu:
        return self.plan.gpu

    @property
    def used_by_others_bytes(self) -> int:
        return self.plan.used_by_others_bytes

    @property
    def tokens_per_step(self) -> int:
        return self.config.tokens_per_step if isinstance(self.config, FineTune) else self.config.batch


@dataclass(frozen=True)
class Change:
    """What is changed: options, whose step, which cards, how they share the step, how much others may hold."""

    options: dict[str, Any] = field(default_factory=dict)
    step: StepName | None = None
    gpu: Gpu | None = None
    used_by_others_bytes: int | None = None
    cluster: Cluster | None = None
    ways: tuple[str, ...] | None = None

    def applied(self, state: State) -> State:
        others = {name: getattr(self, name) for name in ("step", "gpu", "used_by_others_bytes", "cluster", "ways")}
        set_ = {name: value for name, value in others.items() if value is not None}
        return replace(state, config=state.config.model_copy(update=self.options), **set_)


@dataclass(frozen=True)
class Rule:
    """One thing that can be changed. RULES are in the order in which users can afford them.

    `changes`: of a State or a plan, the smallest first. `idle`: the id of why it has nothing to change, '' for silence.
    `redraws`: dropout's masks come out otherwise. `ours`: only foretrain's step can do it. `toll`: what it costs beside
    time, as a share of time. `traced`: only a trace knows its effect. `usual`: which change shows what it can do.
    `several`: of several cards alone. `alternatives`: each change is looked at. `buys`: other hardware. `recuts`: the
    cards may share the step otherwise. The others are as in model/techniques/technique.py.
    """

    id: str
    kind: Kind
    exactness: Exactness
    reference: str
    changes: Callable[[Any], Sequence[Change]]
    idle: Callable[[State], str] = lambda state: ""
    techniques: tuple[str, ...] = ()
    redraws: bool = False
    ours: bool = False
    traced: bool = False
    toll: float = 0.0
    usual: Callable[[Sequence[Change]], int] = lambda found: 0
    drop_order: int = 0
    try_order: int = 0
    instead_of: tuple[str, ...] = ()
    milder: tuple[str, ...] = ()
    quick: bool = False
    lets_grow: bool = False
    place: int = 0
    several: bool = False
    alternatives: bool = False
    buys: bool = False
    recuts: bool = False
    saves: str = ""
    costs: str = ""

    def exactness_on(self, state: State | PlannedState) -> Exactness:
        drawn = self.redraws and isinstance(state, State) and state.config.dropout
        return "rounding" if drawn and self.exactness == "exact" else self.exactness

    @property
    def for_several(self) -> bool:
        """Whether it also helps several cards: it leaves the model and the optimizer as they are, or is of cards."""
        same = self.exactness in ("exact", "rounding") and self.kind in ("memory", "speed", "both") and not self.traced
        return self.several or (same and self.id not in OF_ONE_CARD)

    @property
    def keeps_way(self) -> bool:
        return not (self.several or self.recuts)


def rule_of_options(
    id: str,
    kind: Kind,
    exactness: Exactness,
    options: Callable[[Any], dict[str, Any]],
    reference: str = "",
    *,
    milder: tuple[str, ...] = (),
    instead_of: tuple[str, ...] = (),
    toll: float = 0.0,
) -> Rule:
    """The rule that sets options of a plan; `options` are none where it changes nothing."""

    def changes(plan: FineTunePlan | InferencePlan) -> Sequence[Change]:
        values = options(plan)
        return [Change(values)] if values else []

    return Rule(id, kind, exactness, reference, changes, milder=milder, instead_of=instead_of, toll=toll)


def rule_of(technique: Technique, covers: tuple[str, ...]) -> Rule:
    """The rule that a technique is; `covers`: the techniques that follow it."""
    t = technique
    return Rule(
        t.rule or t.id, t.kind, t.exactness, t.source,
        lambda state: [Change(dict(options)) for options in t.changes(state.effective, state.gpu, state.half)],
        lambda state: t.idle(state.effective, state.gpu, state.half),
        covers, ours=True, traced=t.needs_trace,
        usual=lambda found: t.usual([change.options for change in found]),
        saves=t.saves, costs=t.costs,
        drop_order=t.drop_order, try_order=t.try_order, instead_of=t.instead_of, milder=t.milder, quick=t.quick,
        lets_grow=t.lets_grow, place=t.place,
    )  # fmt: skip


def loosest(found: Sequence[Exactness]) -> Exactness:
    return max(found, key=EXACTNESS.index)
