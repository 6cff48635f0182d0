"""Fine-tuning, traced: the memory of the real Trainer's loop on a card, phase by phase."""

from collections.abc import Callable

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.finetune.request import TRACED_LOOPS, FineTuneRequest, FineTuneTrace, answered


def exact_finetune(
    source: ModelSource,
    tune: FineTune,
    gpu: Gpu,
    available_bytes: int | None,
    listen: Callable[[str], None] = lambda text: None,
    settings: Settings | None = None,
) -> FineTuneTrace:
    """The traced memory of a fine-tuning run, with verdicts for what the process may take, context included.

    `listen` hears how far it is. Raises service.TraceUnavailable with a sentence where it cannot be traced.
    """
    request = FineTuneRequest(source, tune, gpu)
    question = {
        "trace": request.key(), "available_bytes": available_bytes, "settings": (settings or Settings()).text(),
        "grad_accum": tune.grad_accum, "gpu": gpu.model_dump(mode="json"),
    }  # fmt: skip

    def make() -> FineTuneTrace:
        (trace,) = service.traces([request], listen)
        versions = {"torch": str(trace.facts["torch"]), **interpreter.now().versions()}
        return answered(trace, gpu, versions, available_bytes=available_bytes, settings=settings)

    found = service.remembered(question, FineTuneTrace, make)
    if tune.loop in TRACED_LOOPS:
        return found
    note = Note(id="traced_loop", values={"loop": tune.loop})
    return found.model_copy(update={"notes": (*found.notes, note)})
