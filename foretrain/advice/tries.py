"""What can be changed in a run, by its kind, and a run with some of it, planned."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretrain.advice import finetune_tries as tuning
from foretrain.advice import generation_tries as generating
from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.inference import Inference
from foretrain.predict.finetune.plan import FineTunePlan, untimed
from foretrain.predict.inference.plan import InferencePlan, replanned

SearchedPlan = FineTunePlan | InferencePlan
Values = dict[str, Any]


class Menu(NamedTuple):
    """The changes of a kind of run. `groups`: those that make it fit, the next looked at where none before does;
    `other`: after which the result is another; `better`: after which more is learned from the same data."""

    tries: Mapping[str, Callable[[Any], Values]]
    groups: tuple[Collection[str], ...]
    faster: Collection[str]
    other: Collection[str]
    better: Collection[str] = ()


_TUNING = {**tuning.SAME, **tuning.OTHER, **tuning.SPENDING, **tuning.BETTER}
_LEARNS = {*tuning.OTHER, *tuning.BETTER} - {"fp32_weights"}
TUNING = Menu(_TUNING, (tuning.SAME, tuning.OTHER), tuning.FASTER, _LEARNS, tuning.BETTER)
_GENERATING: dict[str, Callable[[Any], Values]] = {**generating.SAME, **generating.OTHER}
GENERATING = Menu(_GENERATING, (generating.FITTING,), generating.FASTER, generating.OTHER)


def menu_of(plan: SearchedPlan) -> Menu:
    return TUNING if isinstance(plan, FineTunePlan) else GENERATING


def asked_of(plan: SearchedPlan) -> FineTune | Inference:
    return plan.tune if isinstance(plan, FineTunePlan) else plan.asked


def tokens_of(plan: SearchedPlan) -> int:
    """Return the tokens of a step."""
    return plan.tune.tokens_per_step if isinstance(plan, FineTunePlan) else plan.asked.batch


@dataclass(frozen=True)
class Tried:
    """Some changes by their ids, the options that they set, and the memory of the run with them; the time of
    fine-tuning is not known yet."""

    ids: tuple[str, ...]
    changed: Values
    plan: SearchedPlan

    @property
    def fits(self) -> bool:
        """Whether the run is safe with them."""
        return self.plan.verdict == "fits"

    @property
    def needed_bytes(self) -> int:
        return self.plan.needed_bytes

    def is_part_of(self, other: "Tried") -> bool:
        """Whether the other does all that this does."""
        return self.changed.items() <= other.changed.items()

    def clashes(self, other: "Tried") -> bool:
        """Whether both set an option, to different values, or one leaves the other nothing to do."""
        if any({*self.ids, *other.ids} >= pair for pair in tuning.IDLE_TOGETHER):
            return True
        return any(other.changed.get(option, value) != value for option, value in self.changed.items())


def tried(plan: SearchedPlan, ids: tuple[str, ...]) -> Tried | None:
    """The run with these changes; None where one of them changes nothing, or this model cannot have them, such as
    modules that its layers are not called."""
    changed: Values = {}
    try:
        for id in ids:
            values = menu_of(plan).tries[id](plan)
            if not values:
                return None
            other = {name for name, value in values.items() if getattr(asked_of(plan), name) != value}
            kept = other | {"amp"} if "method" in other else other  # which another method has otherwise
            changed |= {name: value for name, value in values.items() if name in kept}
        if changed.get("amp") == "bf16" and not plan.gpu.supports_bf16:
            changed["amp"] = "fp16"
        made = untimed(plan, **changed) if isinstance(plan, FineTunePlan) else replanned(plan, **changed)
    except UserError:
        return None
    return Tried(ids, changed, made)


class Tries:
    """The runs with changes of a plan, each planned once; `planned` counts them."""

    def __init__(self, plan: SearchedPlan) -> None:
        self.plan, self.menu = plan, menu_of(plan)
        self._order = list(self.menu.tries)
        self._made: dict[tuple[str, ...], Tried | None] = {}

    @property
    def planned(self) -> int:
        return sum(made is not None for made in self._made.values())

    def outcome(self, ids: tuple[str, ...]) -> Tried | None:
        ids = tuple(sorted(ids, key=self._order.index))
        if ids not in self._made:
            self._made[ids] = tried(self.plan, ids)
        return self._made[ids]
