"""A fine-tuning plan, from what somebody has: a model or a trainer's file, options, a card."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretrain.advice.finetune import FineTuneChange, changes
from foretrain.app.exact_finetune import exact_finetune
from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.facts import ModelSource
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.finetune.largest import FineTuneLargest
from foretrain.predict.finetune.largest import largest as search
from foretrain.predict.finetune.plan import FineTunePlan, plan
from foretrain.predict.trace import service

ESTIMATED = ("finetune_compile", "finetune_liger")  # notes on what only the estimate leaves out


@dataclass(frozen=True)
class FineTuneQuestion:
    """What is asked: a model, how it is trained, and notes on what was read."""

    source: ModelSource
    tune: FineTune
    notes: tuple[Note, ...] = ()


def question(source: str, words: Sequence[str] = ()) -> FineTuneQuestion:
    """A model's name or path, or a trainer's file, with words of the command line over it. Raises UserError."""
    model, tune, reading = read_finetune(source, words)
    return FineTuneQuestion(model, tune, reading.notes)


def plan_question(asked: FineTuneQuestion, gpu: str | Gpu, used_by_others: str | int = "") -> FineTunePlan:
    """The forecast on a card. Raises UserError for what cannot be planned."""
    if isinstance(used_by_others, str):
        used_by_others = stated_bytes(used_by_others, "--used-by-others") if used_by_others else 0
    stated = used_by_others or None
    target = devices.checked(gpu, stated or 0) if isinstance(gpu, Gpu) else devices.target(gpu, stated)
    if target.gpu.kind != "cuda":
        raise UserError("usage.finetune_needs_cuda", gpu=target.gpu.name)
    return plan(asked.source, asked.tune, target.gpu, used_by_others_bytes=target.used_by_others_bytes)


def traced(found: FineTunePlan, asked: FineTuneQuestion, listen: Callable[[str], None]) -> FineTunePlan:
    """The plan with the memory of the real Trainer's loop. Raises UserError where that cannot be traced."""
    try:
        exact = exact_finetune(asked.source, found.tune, found.gpu, found.available_bytes, listen)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None
    notes = tuple(note for note in found.notes if note.id not in ESTIMATED)
    return found.model_copy(update={"memory": exact.memory, "notes": (*notes, *exact.notes)})


def advised(found: FineTunePlan) -> tuple[FineTuneChange, ...]:
    """What to change, best first; nothing where the run fits."""
    return () if found.verdict == "fits" else changes(found)


def largest(found: FineTunePlan, option: str) -> FineTuneLargest:
    """The largest value of an option that fits: batch_size, seq_len or lora_r. Raises UserError for another one."""
    return search(found, option)
