"""The memory and time of a fine-tuning run from a trace of its real code, which models without an estimate have."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.trace import service
from foretrain.predict.trace.finetune.request import TRACED_LOOPS, FineTuneTrace, answered, requests_for

Listen = Callable[[str], None]
Progress = Callable[[], AbstractContextManager[Listen]]
_PROGRESS: ContextVar[Progress] = ContextVar("_PROGRESS", default=lambda: nullcontext(lambda text: None))


@contextmanager
def shown_by(progress: Progress) -> Iterator[None]:
    """Show with `progress` each trace that a plan makes because there is no estimate."""
    before = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(before)


@contextmanager
def listened() -> Iterator[Listen]:
    """Yield what hears how far a trace is that a plan makes by itself; nothing is shown before there is one."""
    shown: list[Listen] = []
    with ExitStack() as stack:

        def listen(text: str) -> None:
            if not shown:
                shown.append(stack.enter_context(_PROGRESS.get()()))
            shown[0](text)

        yield listen


def trace_alone(source: ModelSource, tune: FineTune, gpu: Gpu, available_bytes: int | None) -> FineTuneTrace:
    """Return the trace of a model that has no estimate. Raises UserError where it cannot be traced either."""
    try:
        with listened() as listen:
            return exact_finetune(source, tune, gpu, available_bytes, listen)
    except service.TraceUnavailable as error:
        if tune.images:
            reason = str(error).removeprefix("the trace failed: ").rstrip(".")
            raise UserError("usage.pictures_unknown", model=source.name, reason=reason) from None
        raise unknown(source, str(error)) from None


def unknown(source: ModelSource, reason: str) -> UserError:
    model = str(source.config.get("model_type"))[:40]
    return UserError("usage.family_unknown", model=model, source=source.where, reason=reason)


def exact_finetune(
    source: ModelSource,
    tune: FineTune,
    gpu: Gpu,
    available_bytes: int | None,
    listen: Listen = lambda text: None,
    settings: Settings | None = None,
) -> FineTuneTrace:
    """Return the run's traced memory, with verdicts for what the process may take. Raises service.TraceUnavailable."""
    requests = requests_for(source, tune, gpu)
    question = {
        "traces": [request.key() for request in requests], "available_bytes": available_bytes,
        "settings": (settings or Settings()).text(), "grad_accum": tune.grad_accum, "gpu": gpu.model_dump(mode="json"),
    }  # fmt: skip

    def make() -> FineTuneTrace:
        return answered(service.traces(requests, listen), tune, gpu, available_bytes, settings)

    found = service.remembered(question, FineTuneTrace, make)
    if tune.loop in TRACED_LOOPS:
        return found
    note = Note(id="traced_loop", values={"loop": tune.loop})
    return found.model_copy(update={"notes": (*found.notes, note)})
