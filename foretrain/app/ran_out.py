"""Memory that ran out, as the end of a log says it, and what would have saved that run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrain.advice.remedies import Remedy, remedies, short_of
from foretrain.analysis.run import OutOfMemory, failure_of
from foretrain.app.finetune import advised, plan_question
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.base import oom_message
from foretrain.base.errors import UserError
from foretrain.base.files import read_bytes
from foretrain.base.records import Note
from foretrain.base.units import GIB
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.memory import PhaseMemory
from foretrain.predict.plan import plan
from foretrain.runs.formats.log_format import LogFormat

TAIL_BYTES = 1 << 18  # of a log; where memory ran out it says so at its end
_CARD = 0.88, 1.02  # what CUDA gives of the memory that a card is sold with, at least and at most
# What people change besides their config, the least first.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"compile": False}, {"dtype": "float32"}, {"compile": False, "dtype": "float32"},
)  # fmt: skip

Listen = Callable[[str], object]  # hears what is being done: 'searching'


def ran_out_in(log: Path) -> oom_message.OutOfMemoryMessage | None:
    """What the end of a log says of memory that ran out."""
    try:
        return oom_message.parse(read_bytes(log, 2 * TAIL_BYTES, last_bytes=TAIL_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def failure(message: oom_message.OutOfMemoryMessage) -> OutOfMemory:
    known = {"fatal": True, "expandable_segments": not message.before_2_1}
    return failure_of(message.figures()).model_copy(update=known)


def doubts_of(
    message: oom_message.OutOfMemoryMessage, program: LogFormat | None, config: RunConfig, gpu: Gpu
) -> tuple[Note, ...]:
    """Return why a message cannot be from this config's run on this card. `program`: what printed the log."""
    if program is not None and program.name not in ("nanogpt", "evaluations"):
        return (Note(id="program", values={"program": program.shown}),)
    most = _most(config, gpu)
    found, held = [*_of_card(message, gpu), *_of_need(message, most)], _held(message)
    if any(note.id == "held" for note in found):
        for changes in _VARIANTS:
            most = _most(config.model_copy(update=changes), gpu)
            if most is not None and held <= most.needed_high_bytes:
                words = " ".join(f"--{key}={value}" for key, value in changes.items())
                values = {"change": words, "needed": most.allocated_bytes, "high": most.needed_high_bytes}
                found.append(Note(id="variant", values=values))
                break
        else:
            found.append(Note(id="no_variant", values={}))
    return tuple(found)


def _of_card(message: oom_message.OutOfMemoryMessage, gpu: Gpu) -> list[Note]:
    """Return that a message is from a card of another size."""
    card, label = message.card_bytes, gpu.label_bytes
    if card is None or label is None or _CARD[0] <= card / label <= _CARD[1]:
        return []
    return [Note(id="card", values={"logged": card, "gpu": gpu.name, "given": label})]


def _held(message: oom_message.OutOfMemoryMessage) -> int:
    """Return the bytes of tensors that the run held or asked for, as far as the message says."""
    return message.allocated_bytes + (message.asked_bytes or 0) if message.allocated_bytes is not None else 0


def _of_need(message: oom_message.OutOfMemoryMessage, most: PhaseMemory | None) -> list[Note]:
    """Return that a run held more than it needs by its plan."""
    held = _held(message)
    if most is None or held <= most.needed_high_bytes:
        return []
    return [Note(id="held", values={"held": held, "needed": most.allocated_bytes, "high": most.needed_high_bytes})]


def _most(config: RunConfig, gpu: Gpu) -> PhaseMemory | None:
    """The worst phase of nanoGPT's run; None where the card cannot do what the config asks for."""
    try:
        return plan(config, gpu).memory_of("nanogpt").neediest
    except UserError:
        return None


def saved_by(
    message: oom_message.OutOfMemoryMessage, failed: OutOfMemory, config: RunConfig, gpu: Gpu
) -> tuple[Remedy, ...]:
    """Return what would have saved nanoGPT's run on a card with the memory that the message states."""
    gpu = _as_stated(message, gpu)
    return remedies(
        config, gpu, used_by_others_bytes=failed.used_by_others_bytes or 0, over_bytes=_over_bytes(failed),
        step="nanogpt", expandable_segments=failed.expandable_segments,
    )  # fmt: skip


def _over_bytes(failed: OutOfMemory) -> int:
    """Return the bytes that were missing. Where nobody says what was left, that is all that was asked for."""
    return (failed.over_bytes if failed.over_bytes is not None else failed.asked_bytes) or 0


def finetune_saved_by(
    message: oom_message.OutOfMemoryMessage,
    program: LogFormat | None,
    failed: OutOfMemory,
    asked: FineTuneQuestion,
    gpu: Gpu,
) -> dict[str, Any]:
    """Return the doubts about a fine-tuning run's log, or what would have saved the run. Raises UserError."""
    if program is not None and program.has_config:
        return {"doubts": (Note(id="program_finetune", values={"program": program.shown}),)}
    gpu, others_bytes = _as_stated(message, gpu), failed.used_by_others_bytes or 0
    found = plan_question(asked, gpu, others_bytes)
    if found.bound != "exact":
        return {"unknown": "not_planned"}
    doubts = [*_of_card(message, gpu), *_of_need(message, found.memory.neediest)]
    if doubts:
        longer = [Note(id="longer", values={"seq_len": found.tune.seq_len})] if doubts[-1].id == "held" else []
        return {"doubts": (*doubts, *longer)}
    short_bytes = short_of(found.available_bytes or 0, found.needed_bytes, _over_bytes(failed))
    changes = advised(plan_question(asked, gpu, others_bytes + short_bytes))
    return {"changes": tuple(change for change in changes if change.effect.verdict == "fits")}


def _as_stated(message: oom_message.OutOfMemoryMessage, gpu: Gpu) -> Gpu:
    if message.card_bytes is None:
        return gpu
    return gpu.model_copy(update={"cuda_memory_gib": message.card_bytes / GIB})
