"""What a report shows beyond a plan's own figures: one step moment by moment, the roofline, what else one could do."""

from dataclasses import dataclass

from foretrain.advice import frontier
from foretrain.advice.frontier import Frontier
from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.measure.tune_record import Tuning
from foretrain.predict.memory import Verdict, predict
from foretrain.predict.plan import Plan, available, timing
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.limit import Roofline, roofline
from foretrain.predict.speed.time import Range
from foretrain.predict.step_moments import StepMoments, step_moments

# The same run on the other cards of the catalogue, all predicted, with the same memory used by other programs. A card's
# rent is not known; electricity costs what the config says.

# Those that people ask about; a picture of all of them would be none.
USUAL = (
    "RTX 3060 12GB", "RTX 3080 10GB", "RTX 3090", "RTX 4060", "RTX 4060 Ti 16GB", "RTX 4070", "RTX 4080", "RTX 4090",
    "RTX 5070", "RTX 5090", "T4", "L4", "A100 SXM4 80GB", "H100 SXM5 80GB",
)  # fmt: skip


class CardOption(Record):
    """One card. `cost`: electricity in the config's currency; `own`: the card that is planned for or was trained on."""

    name: str
    own: bool
    usual: bool
    memory_bytes: int
    needed_bytes: int
    verdict: Verdict | None
    total_s: Range
    energy_j: float | None
    cost: float | None
    dtype: str


def card_options(plan: Plan, step: StepName) -> tuple[CardOption, ...]:
    """Every card whose speed is known, the quickest first, with the memory that other programs use here."""
    found = []
    for gpu in [plan.gpu, *(gpu for gpu in catalogue().values() if gpu.name != plan.gpu.name)]:
        option = _option(plan, gpu, step)
        if option is not None:
            found.append(option)
    return tuple(sorted(found, key=lambda option: option.total_s.expected_s))


def _option(plan: Plan, gpu: Gpu, step: StepName) -> CardOption | None:
    own = gpu.name == plan.gpu.name
    config = plan.config.model_copy(update={"memory_limit": plan.config.memory_limit if own else ""})
    config = config.model_copy(update={"price_per_hour": 0.0})
    if not own and (gpu.kind != "cuda" or gpu.memory_bytes is None):
        return None
    if plan.gpu.kind == "cpu" and not own:  # what a CPU ran in fp32, a card would run in what suits it
        config = config.model_copy(update={"dtype": "auto", "device": "cuda", "attention": "sdpa"})
    try:
        spec = StepSpec.checked(config, gpu, step)
    except UserError:
        return None
    took = timing(spec)
    if took is None or gpu.memory_bytes is None:
        return None
    # what fills a computer's memory is on no card
    others = plan.used_by_others_bytes if own or plan.gpu.kind == "cuda" else 0
    room, _ = available(config, gpu, others)
    memory = predict(spec, room)
    return CardOption(
        name=gpu.name, own=own, usual=gpu.name in USUAL, memory_bytes=gpu.memory_bytes, dtype=spec.dtype,
        needed_bytes=memory.needed_bytes, verdict=memory.verdict,
        total_s=took.length_s, energy_j=took.energy_expected_j, cost=took.cost_expected,
    )  # fmt: skip


@dataclass(frozen=True)
class Outlook:
    """Of one plan and one way to run the step. None and () where nothing is known."""

    step: StepName
    moments: StepMoments | None
    roofline: Roofline | None
    frontier: Frontier | None
    cards: tuple[CardOption, ...]


def outlook(plan: Plan, step: StepName, *, traced: StepMoments | None = None, tuning: Tuning | None = None) -> Outlook:
    """Arithmetic, in about a second. `traced`: the moments of the real step; `tuning`: what was measured instead."""
    spec = plan.spec(step)
    moments = traced or step_moments(spec)
    measured = frontier.measured(tuning, plan.available_bytes) if tuning else None
    return Outlook(
        step=step, moments=None if plan.config.eval_only else moments,
        roofline=roofline(spec),
        frontier=measured or frontier.predicted(plan, step), cards=card_options(plan, step),
    )  # fmt: skip
