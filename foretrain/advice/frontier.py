"""Throughput against memory: what a card gives for its memory, by the ways to carry out the same step.

As `foretrain tune` measured, else predicted over micro-batches and two techniques.
"""

from typing import Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.microbatches import divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.measure.tune_record import Tuning
from foretrain.predict.memory import Verdict, predict
from foretrain.predict.plan import Plan
from foretrain.predict.spec import StepName
from foretrain.predict.speed.time import step_time

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


def predicted(plan: Plan, step: StepName) -> Frontier | None:
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


def measured(tuning: Tuning, available_bytes: int | None) -> Frontier | None:
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
