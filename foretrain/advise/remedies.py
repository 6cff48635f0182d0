"""What would have saved a run that ran out of memory: changes that leave the learning alone, each planned again.

One function, `remedies`; a fuller search over every knob can take its place.
"""

from collections.abc import Iterator
from typing import Any

from foretrain.batchsplit import cut, sequences_of, shrunk
from foretrain.config import RunConfig
from foretrain.errors import UserError
from foretrain.hardware import Gpu
from foretrain.predict.plan import Plan, plan
from foretrain.records import Record

CHUNK = 1024
MOST_HALVINGS = 12


class Remedy(Record):
    """A change that fits by the plan. `changes`: knob -> value; `saves_bytes`: of the whole process at its worst moment.

    `slower`: the predicted step time over that of before, less 1; None where there is no prediction of time.
    """

    id: str
    changes: dict[str, Any]
    saves_bytes: int
    needed_bytes: int
    slower: float | None


def remedies(
    config: RunConfig, gpu: Gpu, *, others_bytes: int = 0, over_bytes: int = 0, evaluating: bool = False, most: int = 3
) -> tuple[Remedy, ...]:
    """Exact changes that fit what the card had, kindest first: those that cost least time.

    `over_bytes`: how far the request that failed was beyond what was there; a change must save as much at least, so
    that a forecast which was too low does not promise what did not hold. `evaluating`: it failed in an evaluation.
    Tokens of a step, and the sequences of an evaluation, stay as they are.
    """
    before = _planned(config, gpu, others_bytes)
    if before is None:
        return ()
    needed = _needed(before)
    found: list[Remedy] = []
    for id, changed in _candidates(config, evaluating):
        after = _planned(changed, gpu, others_bytes)
        if after is None or after.verdict_of("foretrain") == "does_not_fit":
            continue
        saves = needed - _needed(after)
        if saves < max(over_bytes, 1) or any(remedy.id == id for remedy in found):
            continue
        changes = {
            name: value for name, value in changed if value != getattr(config, name) and name != "eval_sequences"
        }
        found.append(
            Remedy(id=id, changes=changes, saves_bytes=saves, needed_bytes=_needed(after), slower=_slower(before, after))
        )
    found.sort(key=lambda remedy: remedy.slower if remedy.slower is not None else 0.0)
    return tuple(found[:most])


def _candidates(config: RunConfig, evaluating: bool) -> Iterator[tuple[str, RunConfig]]:
    """Each change by itself, the smallest first of its kind; then two together."""
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


def _needed(made: Plan) -> int:
    return max(phase.needed_expected_bytes for phase in made.memory_of("foretrain").phases)


def _slower(before: Plan, after: Plan) -> float | None:
    if before.timing is None or after.timing is None:
        return None
    return after.timing.step_s.expected_s / before.timing.step_s.expected_s - 1
