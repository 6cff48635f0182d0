"""What a report shows beyond a plan's own figures: one step moment by moment, the roofline, what else one could do."""

from dataclasses import dataclass
from typing import Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.microbatches import divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.measure.tune_record import Tuning
from foretrain.predict.memory import Verdict, predict
from foretrain.predict.plan import Plan, available, timing
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.limit import Roofline, roofline
from foretrain.predict.speed.time import Range, step_time
from foretrain.predict.step_moments import StepMoments, step_moments

MOST_BATCHES = 10
BEYOND = 1.5  # times what the card has
CHUNK = 1024  # tokens of a chunk of the loss, where the config has none

Way = Literal["as_is", "chunked_loss", "checkpointing", "tuned"]


class FrontierPoint(Record):
    """One way. `given`: the config's own; `best`: no other is faster in less memory."""

    way: Way
    batch_size: int
    setting: str
    needed_bytes: int
    tokens_per_s: float
    verdict: Verdict | None = None
    given: bool = False
    best: bool = False


class Frontier(Record):
    """All ways that were looked at, by memory. `source` is their source."""

    points: tuple[FrontierPoint, ...]
    source: str
    available_bytes: int | None


def predict_frontier(plan: Plan, step: StepName) -> Frontier | None:
    """Over the divisors of a step's sequences, and techniques; None where nothing is known of the card's speed."""
    config = plan.config.as_nanogpt() if step == "nanogpt" else plan.config
    points = []
    for way, changed in _ways(config, step).items():
        for batch in _batches(config):
            point = _point(plan, step, way, with_micro_batch(changed, batch), config)
            if point is not None:
                points.append(point)
    room = plan.available_bytes
    if room is not None:  # what is far beyond the card would only make the picture small
        points = [point for point in points if point.given or point.needed_bytes <= BEYOND * room]
    if not points:
        return None
    timing = plan.timing_of(step)
    source = timing.source if timing and timing.source != "measured (log)" else "estimated"
    return Frontier(points=_marked(points), source=source, available_bytes=plan.available_bytes)


def frontier_of_tuning(tuning: Tuning, available_bytes: int | None) -> Frontier | None:
    """The trials of `foretrain tune` that ran to their end."""
    points = [
        FrontierPoint(
            way="tuned", batch_size=int(trial.options.get("batch_size", 0)), given=trial.given,
            setting=", ".join(f"{name}={str(value).lower()}" for name, value in trial.options.items()),
            needed_bytes=trial.peak_bytes, tokens_per_s=trial.tokens_per_s,
        )
        for trial in tuning.trials
        if trial.peak_bytes and trial.tokens_per_s and trial.verdict not in ("memory", "timeout", "failed", "changed")
    ]  # fmt: skip
    cap = tuning.cap_bytes or available_bytes
    return Frontier(points=_marked(points), source="measured (tune)", available_bytes=cap) if points else None


def _ways(config: RunConfig, step: StepName) -> dict[Way, RunConfig]:
    """nanoGPT's step has no techniques."""
    ways: dict[Way, RunConfig] = {"as_is": config}
    if step == "foretrain":
        if not config.loss_chunk_size:
            ways["chunked_loss"] = config.model_copy(update={"loss_chunk_size": CHUNK})
        if not config.checkpointed:
            ways["checkpointing"] = config.model_copy(update={"activation_checkpointing": True})
    return ways


def _batches(config: RunConfig) -> list[int]:
    """Divisors that are powers of two apart or so, the config's own always."""
    own, found, last = config.batch_size, [], 0.0
    for batch in divisors(sequences_of(config)):
        if batch == own or batch >= 1.6 * last:
            found.append(batch)
            last = batch
    near = sorted(found, key=lambda batch: max(batch / own, own / batch))[:MOST_BATCHES]
    return sorted(near)


def _point(plan: Plan, step: StepName, way: Way, config: RunConfig, given: RunConfig) -> FrontierPoint | None:
    try:
        spec = plan.model_copy(update={"config": config}).spec(step)
    except UserError:  # several cards cannot share these micro-batches
        return None
    time_s = step_time(spec)
    if time_s is None:
        return None
    memory = predict(spec, plan.available_bytes)
    return FrontierPoint(
        way=way, batch_size=config.batch_size, setting="", tokens_per_s=config.tokens_per_step / time_s.expected_s,
        needed_bytes=memory.needed_bytes, verdict=memory.verdict,
        given=way == "as_is" and config.batch_size == given.batch_size,
    )  # fmt: skip


def _marked(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    ordered, fastest, marked = sorted(points, key=lambda p: (p.needed_bytes, -p.tokens_per_s)), 0.0, []
    for point in ordered:
        marked.append(point.model_copy(update={"best": point.tokens_per_s > fastest}))
        fastest = max(fastest, point.tokens_per_s)
    return tuple(marked)


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
    """Every card whose speed is known, the fastest first, with the memory that other programs use here."""
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
    measured = frontier_of_tuning(tuning, plan.available_bytes) if tuning else None
    return Outlook(
        step=step, moments=None if plan.config.eval_only else moments,
        roofline=roofline(spec),
        frontier=measured or predict_frontier(plan, step), cards=card_options(plan, step),
    )  # fmt: skip
