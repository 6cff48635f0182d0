"""What an option of a run is: its value's type and limits, and all else that is known of it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

from foretrain.base.records import Record

Group = Literal["model", "data", "batch", "optimizer", "evaluation", "run", "system", "cost"]
GROUPS: tuple[Group, ...] = get_args(Group)
Effect = Literal["speed", "memory", "learning"]
EVERYTHING: tuple[Effect, ...] = ("speed", "memory", "learning")
COST: tuple[Effect, ...] = ("speed", "memory")
LEARNING: tuple[Effect, ...] = ("learning",)
NOTHING: tuple[Effect, ...] = ()
# free: nothing hangs on it. rounding: the same training, but another order of sums. evaluation: later losses are not of
# the same sequences. refuses: it decides what is learned.
OnResume = Literal["free", "rounding", "evaluation", "refuses"]
# has: an option of nanoGPT's own. lacks: nanoGPT has none, but what it says holds for nanoGPT's step too. cannot:
# foretrain's own way to carry a step out; nanoGPT's step does without.
InNanogpt = Literal["has", "lacks", "cannot"]
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
Stops = Literal["each", "by64", "doubling", "halves", "decades", "cents", "dimes", "fifties"]


@dataclass(frozen=True)
class Tuned:
    """That `foretrain tune` searches an option. `spread`: standard deviation, in the logarithm of a step's time, of
    what a catalogue's forecast misses (half by a calibration). `paired`: hangs on the other paired ones."""

    spread: float = 0.0
    paired: bool = False


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """What is known of an option beside its name, type, default and help. What matters has no default."""

    group: Group
    affects: tuple[Effect, ...]  # what another value can change: of a training step, or of what is learned
    on_resume: OnResume
    unit: str = ""
    letter: str = ""  # in formulas of memory
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    nanogpt: InNanogpt = "has"
    inert: bool = False  # accepted so that nanoGPT's files read, without effect
    aliases: tuple[str, ...] = ()  # other spellings
    adds: bool = False  # typed twice, its values are joined by a comma; else the last one counts
    label: bool = False  # a name for people: where nanoGPT's file computes it by running code, it is left out
    needs: tuple[str, Any] | None = None  # another option and the value that it must have for this one to be read
    idle: tuple[tuple[str, str], ...] = ()  # (kind of device, or dtype; why it does nothing there)
    refused: tuple[tuple[str, str], ...] = ()  # (kind of device; why it must not be set there)
    compared: bool = True  # not, where it stands for others, or says nothing of the training
    bare: str = ""  # what it is where it is typed without a value
    choice_names: Mapping[str, str] = field(default_factory=dict[str, str])  # what others call its choices
    # Words of their own that stand for a choice: (word, its choice, the choice where it is off, or "" for none).
    switches: tuple[tuple[str, str, str], ...] = ()
    thousand: int = 0  # what k stands for in a value; 0: it is not taken
    texts: str = "knob"  # where the translations of its help stand
    # Two values that come to the same on a device share an estimate and a trace: these are kept by what it comes to.
    by_effect: bool = False
    # How a timed step must agree to be a reference: by value, within a factor of two, or as predict/speed/time.py says.
    reference: Literal["same", "near", "other"] = "same"
    from_weights: bool = False  # the weights that a run starts from bring it
    # A run on a CPU chooses it where nobody gave it, or gave this value; None: it does not.
    chosen_on_cpu: Any = None
    tuned: Tuned | None = None
    largest: tuple[int, int] | None = None  # (granule, highest) of the search for the largest value that fits
    basic: int = 0  # the place among the first on the page; 0: folded by group
    slider: tuple[float, float, Stops] | None = None  # where one on the page begins and ends, and how its stops grow

    @property
    def ours(self) -> bool:
        return self.nanogpt != "has"

    def __call__(self, schema: dict[str, Any]) -> None:
        """Add to a JSON schema what a reader of it wants to know."""
        schema |= {"unit": self.unit, "group": self.group, "ours": self.ours, "inert": self.inert}


def option(default: Any, help: str, *, pattern: str | None = None, **attributes: Any) -> Any:
    """The field of one option; `attributes` are those of `Attributes`. Raises TypeError where one is missing."""
    known = Attributes(**attributes)
    return Field(
        default,
        description=help,
        ge=known.least,
        gt=known.above,
        le=known.most,
        lt=known.below,
        pattern=pattern,
        json_schema_extra=known,
    )


# Options of several cards, which several kinds of run have.
_card = partial(option, group="system", affects=COST, on_resume="free", compared=False, texts="finetune_knob")
PER_NODE = _card(0, "of them in one machine; 0: all", least=0, unit="cards")
LINK = _card("", "what connects the cards of a machine; empty: what such cards usually have")
NETWORK = _card("", "what connects the machines; empty: what they usually have")


@dataclass(frozen=True, kw_only=True)
class Option(Attributes):
    name: str
    default: Any
    help: str
    type: str
    choices: tuple[Any, ...]
    limits: str  # '≥ 1, ≤ 1,000', 'one of float32, …' or ''

    @classmethod
    def of(cls, name: str, field: FieldInfo) -> "Option":
        known: Any = field.json_schema_extra
        choices, help = get_args(field.annotation), field.description or ""
        return cls(
            **vars(known), name=name, default=field.default, help=help, choices=choices,
            type="choice" if choices else getattr(field.annotation, "__name__", "choice"),
            limits=_limits(known, choices, help, any(hasattr(rule, "pattern") for rule in field.metadata)),
        )  # fmt: skip

    @property
    def is_switch(self) -> bool:
        """Whether it may be typed without a value and with "no-" before it, and a file may say true or false."""
        return self.type == "bool" or bool(self.bare)

    def allows(self, value: float) -> bool:
        low = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return low and (self.most is None or value <= self.most) and (self.below is None or value < self.below)

    def idle_on(self, *conditions: Any) -> str:
        """Why it does nothing on this kind of device or in this dtype; empty where it does something."""
        return next((why for where, why in self.idle if where in conditions), "")

    def refused_on(self, kind: str) -> str:
        """Why it must not be set on this kind of device; empty where it may."""
        return next((why for where, why in self.refused if where == kind), "")


def options_of(record: type[Record]) -> Mapping[str, Option]:
    return {name: Option.of(name, field) for name, field in record.model_fields.items()}


def _limits(known: Attributes, choices: tuple[Any, ...], help: str, has_pattern: bool) -> str:
    if choices:
        return "one of " + ", ".join(map(str, choices))
    if has_pattern and help:
        return help
    ends = (("≥", known.least), (">", known.above), ("≤", known.most), ("<", known.below))
    return ", ".join(f"{sign} {value:,}" for sign, value in ends if value is not None)
