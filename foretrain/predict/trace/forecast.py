"""A plan with its memory from traces instead of the ledger: `foretrain plan --exact`. No torch in this process."""

from collections.abc import Callable

from foretrain.predict import software
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.plan import Note, Plan
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.memory import Exact, exact
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.service import Request, TraceUnavailable

Listener = Callable[[str], None]


def requests_for(spec: StepSpec) -> list[Request]:
    """One trace, or two where pad_mm's choice for an unaligned vocabulary can only be measured on the card."""
    unaligned = spec.compiled and spec.config.vocab_size % 8 != 0 and spec.half
    return [Request(spec, pads) for pads in ((False, True) if unaligned else (False,))]


# Notes on what only a trace knows.
REPLACED = ("vocab_unaligned", "matmul_in_ledger", "compiled_roughly")


def traced(plan: Plan, settings: Settings | None = None, listen: Listener = lambda text: None) -> Plan:
    """The plan with exact memory for both ways to write the step; where no trace can be made, the ledger's answer
    stands and a note says why."""
    try:
        answers = answers_for(plan, [memory.step for memory in plan.memory], settings, listen)
    except TraceUnavailable as error:
        note = Note(id="trace_unavailable", values={"reason": str(error)})
        return plan.model_copy(update={"notes": (*plan.notes, note)})
    notes = tuple(note for note in plan.notes if note.id not in REPLACED)
    if any(each.pads_unknown for each in answers):
        notes += (Note(id="pads_unknown", values={"vocab_size": plan.config.vocab_size}),)
    notes += other_torch(plan.config.torch_version, interpreter.now().torch, compiled=plan.compiled)
    memory = tuple(each.memory for each in answers)
    return plan.model_copy(update={"memory": memory, "exact": tuple(answers), "notes": notes})


def other_torch(trains: str, traced: str, *, compiled: bool) -> tuple[Note, ...]:
    """A note where another torch will train than traced. Uncompiled steps take the same in 2.6.0, 2.9.1 and 2.13.0, to
    the byte (tests/torch_versions); what Inductor fuses differs."""
    wanted = software.parse(trains)
    if wanted is None or wanted == software.parse(traced):
        return ()
    known = not compiled and wanted >= (2, 6)
    return (
        Note(id="trace_other_torch" if known else "trace_unknown_torch", values={"torch": traced, "wanted": trains}),
    )


def answers_for(
    plan: Plan, steps: list[StepName], settings: Settings | None, listen: Listener = lambda text: None
) -> list[Exact]:
    """The exact memory of ways to write the step, under what the plan's card leaves; traced side by side.

    Raises TraceUnavailable.
    """
    wanted: dict[StepName, list[Request]] = {step: requests_for(plan.spec(step)) for step in steps}
    made: dict[StepName, list[Trace]] = {}

    def make(step: StepName) -> Exact:
        if not made:  # all of them at once, when the first answer is not known yet
            found = service.traces([request for requests in wanted.values() for request in requests], listen)
            for each, requests in wanted.items():
                made[each], found = found[: len(requests)], found[len(requests) :]
        return exact(
            made[step], plan.memory_of(step), available_bytes=plan.available_bytes, settings=settings,
            capped=_capped(plan, step), device_bytes=plan.gpu.memory_bytes,
        )  # fmt: skip

    answers = []
    for step in steps:
        question = {
            "traces": [request.key() for request in wanted[step]], "available_bytes": plan.available_bytes,
            "settings": (settings or Settings()).text(), "capped": _capped(plan, step),
            "device_bytes": plan.gpu.memory_bytes,
            "config": plan.config.model_dump(mode="json"),
        }  # fmt: skip
        answers.append(service.remembered(question, Exact, lambda step=step: make(step)))
    return answers


def _capped(plan: Plan, step: StepName) -> bool:
    """Whether the trainer caps the allocator; nanoGPT has no such knob."""
    return step == "foretrain" and plan.available_reason == "memory_limit"
