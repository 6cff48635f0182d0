"""A plan with its memory from traces instead of the ledger: `foretrain plan --exact`. No torch in this process."""

from collections.abc import Callable

from foretrain.config import RunConfig
from foretrain.hardware import Dtype, Gpu
from foretrain.predict.allocator_settings import Settings
from foretrain.predict.exact import service
from foretrain.predict.exact.memory import Exact, exact
from foretrain.predict.exact.record import Trace
from foretrain.predict.exact.service import Request, TraceUnavailable
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Note, Plan

Listener = Callable[[str], None]


def requests_for(config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, *, compiled: bool) -> list[Request]:
    """One trace, or two where pad_mm's choice for an unaligned vocabulary can only be measured on the card."""
    unaligned = compiled and config.vocab_size % 8 != 0 and dtype != "float32"
    return [Request(config, gpu, dtype, step, compiled, pads) for pads in ((False, True) if unaligned else (False,))]


def traced(plan: Plan, settings: Settings | None = None, listen: Listener = lambda text: None) -> Plan:
    """The plan with exact memory for both ways to write the step; where no trace can be made, the ledger's answer
    stands and a note says why."""
    wanted = {
        memory.step: requests_for(plan.config, plan.gpu, plan.dtype, memory.step, compiled=plan.compiled)
        for memory in plan.memory
    }
    try:
        found = service.traces([request for requests in wanted.values() for request in requests], listen)
    except TraceUnavailable as error:
        note = Note(id="trace_unavailable", values={"reason": str(error)})
        return plan.model_copy(update={"notes": (*plan.notes, note)})
    answers = []
    for memory in plan.memory:
        count = len(wanted[memory.step])
        traces, found = found[:count], found[count:]
        answers.append(answer(plan, memory.step, traces, settings))
    memory = tuple(each.memory for each in answers)
    notes = tuple(note for note in plan.notes if note.id != "vocab_unaligned")
    if any(each.pads_unknown for each in answers):
        notes += (Note(id="pads_unknown", values={"vocab_size": plan.config.vocab_size}),)
    return plan.model_copy(update={"memory": memory, "exact": tuple(answers), "notes": notes})


def answer(plan: Plan, step: StepName, traces: list[Trace], settings: Settings | None) -> Exact:
    """The exact memory of one way to write the step, under what the plan's card leaves."""
    return exact(
        traces, plan.memory_of(step), available_bytes=plan.available_bytes, settings=settings,
        capped=step == "foretrain" and plan.available_reason == "memory_limit",
    )  # fmt: skip
