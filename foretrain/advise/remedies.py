"""What would have saved a run that ran out of memory: changes that leave the learning alone, each planned again.

One function, `remedies`; a fuller search over every knob can take its place.
"""

from collections.abc import Iterator
from typing import Any

from foretrain.batchsplit import cut, sequences_of, shrunk
from foretrain.config import RunConfig
from foretrain.errors import UserError
from foretrain.hardware import Gpu
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan, plan
from foretrain.records import Record

CHUNK = 1024
MOST_HALVINGS = 12


class Remedy(Record):
    """A change that fits by the plan. `changes`: knob -> value; `saves_bytes`: of the process at its worst moment.

    `slower`: the predicted step time over that of before, less 1; None where there is no prediction of time.
    """

    id: str
    changes: dict[str, Any]
    saves_bytes: int
    needed_bytes: int
    slower: float | None


def remedies(
    config: RunConfig, gpu: Gpu, *, others_bytes: int = 0, over_bytes: int = 0, evaluating: bool = False,
    step: StepName = "foretrain", most: int = 3,
) -> tuple[Remedy, ...]:  # fmt: skip
    """Exact changes that fit what the card had, kindest first: those that cost least time.

    `over_bytes`: how far the request that failed was beyond what was there; a change must save as much at least, so
    that a forecast which was too low does not promise what did not hold. `evaluating`: it failed in an evaluation.
    Tokens of a step, and the sequences of an evaluation, stay as they are. `step`: whose step ran out; nanoGPT has the
    micro-batch alone, and foretrain's step at the same config may be one change more (a Remedy without changes).
    """
    before = _planned(config, gpu, others_bytes)
    if before is None:
        return ()
    needed = _needed(before, step)
    found: list[Remedy] = []
    for id, own, changed in _candidates(config, evaluating, step):
        after = _planned(changed, gpu, others_bytes)
        if after is None or after.verdict_of(own) == "does_not_fit":
            continue
        saves = needed - _needed(after, own)
        if saves < max(over_bytes, 1) or any(remedy.id == id for remedy in found):
            continue
        changes = {
            name: value for name, value in changed if value != getattr(config, name) and name != "eval_sequences"
        }
        found.append(
            Remedy(
                id=id, changes=changes, saves_bytes=saves, needed_bytes=_needed(after, own),
                slower=_slower(before, step, after, own),
            )
        )  # fmt: skip
    found.sort(key=lambda remedy: remedy.slower if remedy.slower is not None else 0.0)
    return tuple(found[:most])


def _candidates(config: RunConfig, evaluating: bool, step: StepName) -> Iterator[tuple[str, StepName, RunConfig]]:
    """(id, whose step, config) of each change by itself, the smallest first of its kind; then of two together."""
    if step == "nanogpt":
        yield "foretrain", "foretrain", config
        for smaller in _splits(config):
            yield "split", "nanogpt", smaller
        return
    for id, changed in _changes(config, evaluating):
        yield id, "foretrain", changed


def _changes(config: RunConfig, evaluating: bool) -> Iterator[tuple[str, RunConfig]]:
    splits = list(_splits(config))
    if evaluating:
        size = config.eval_batch
        while size > 1:
            size //= 2
            yield "eval_batch", config.model_copy(update={"eval_batch_size": size, "eval_sequences": config.eval_rows})
    chunked = config.model_copy(update={"loss_chunk_size": CHUNK})
    chunks = not config.loss_chunk_size and not config.auto_chunker
    if chunks:
        yield "loss_chunk", chunked
    for smaller in splits:
        yield "split", smaller
    if not config.activation_checkpointing:
        yield "checkpointing", config.model_copy(update={"activation_checkpointing": True})
    if chunks:
        for smaller in _splits(chunked):
            yield "split_and_chunk", smaller
    if chunks and not config.activation_checkpointing:
        for smaller in (chunked, *_splits(chunked)):
            yield "all_three", smaller.model_copy(update={"activation_checkpointing": True})


def _splits(config: RunConfig) -> Iterator[RunConfig]:
    """The same rows in smaller micro-batches, evaluated in batches of the same size as before or smaller."""
    for _ in range(MOST_HALVINGS):
        smaller = shrunk(config.batch_size, sequences_of(config))
        if smaller is None:
            return
        config = cut(config, smaller)
        yield config


def _planned(config: RunConfig, gpu: Gpu, others_bytes: int) -> Plan | None:
    try:
        return plan(config, gpu, others_bytes=others_bytes)
    except (UserError, ValueError):  # a card that cannot do what the config asks for
        return None


def _needed(made: Plan, step: StepName) -> int:
    return max(phase.needed_expected_bytes for phase in made.memory_of(step).phases)


def _slower(before: Plan, step: StepName, after: Plan, own: StepName) -> float | None:
    old = before.timing if step == "foretrain" else before.nanogpt_timing
    new = after.timing if own == "foretrain" else after.nanogpt_timing
    return new.step_s.expected_s / old.step_s.expected_s - 1 if old is not None and new is not None else None
