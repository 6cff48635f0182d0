"""A plan with its memory from traces instead of estimates: `foretrain plan --exact`. No torch in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from foretrain.base.records import Note, Record
from foretrain.config.shape import ModelShape
from foretrain.predict import software
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.estimate.ranks import dealt
from foretrain.predict.memory import RunMemory
from foretrain.predict.plan import Plan
from foretrain.predict.spec import DISTINCT_MICRO_BATCHES, StepName, StepSpec
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.memory import Exact, answer
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.service import Request, TraceUnavailable

Listener = Callable[[str], None]


def requests_for(spec: StepSpec, rank: int = 0) -> list[Request]:
    """Return one request, or more where only the card can tell: pad_mm's choice, when NCCL releases a bucket."""
    unaligned = spec.compiled and spec.config.vocab_size % 8 != 0 and spec.half
    buckets = spec.sharing is not None and not spec.sharing.way.shards_weights
    either, no = (False, True), (False,)
    return [
        Request(spec, pads, rank, keeps)
        for pads in (either if unaligned else no)
        for keeps in (either if buckets else no)
    ]


REPLACED = ("vocab_unaligned", "matmul_in_ledger", "compiled_roughly")


def traced(plan: Plan, settings: Settings | None = None, listen: Listener = lambda text: None) -> Plan:
    """Return the plan with exact memory of both steps; without a trace the estimate stays and a note says why."""
    try:
        answers = answers_for(plan, [memory.step for memory in plan.memory if memory.step], settings, listen)
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
    """Note that another torch will train; uncompiled, 2.6.0, 2.9.1 and 2.13.0 are equal (tests/torch_versions)."""
    wanted = software.parse(trains)
    if wanted is None or wanted == software.parse(traced):
        return ()
    known = not compiled and wanted >= (2, 6)
    return (
        Note(id="trace_other_torch" if known else "trace_unknown_torch", values={"torch": traced, "wanted": trains}),
    )


@dataclass(frozen=True)
class Question:
    requests: tuple[Request, ...]
    estimate: RunMemory
    available_bytes: int | None
    capped: bool
    settings: Settings | None

    @property
    def spec(self) -> StepSpec:
        return self.requests[0].spec

    def key(self) -> dict[str, Any]:
        traces, config = [request.key() for request in self.requests], self.spec.config.model_dump(mode="json")
        return {**self.as_json(), "traces": traces, "config": config}

    def asked(self) -> list[Request]:
        if len(self.requests) != 1:
            return [*self.requests]
        settings = self.settings or Settings()
        one = self.requests[0]
        asking = Asking(one.spec, one.pads, one.rank, one.keeps, self)
        return [asking if Settings.parse(settings.text()) == settings else one]

    def as_json(self) -> dict[str, Any]:
        """Return the question for a worker (memory.py, answer)."""
        return {
            "traced": DISTINCT_MICRO_BATCHES, "micro_batches": self.spec.config.gradient_accumulation_steps,
            "ledger": self.estimate.model_dump(mode="json"), "available_bytes": self.available_bytes,
            "settings": (self.settings or Settings()).text(), "capped": self.capped,
            "device_bytes": self.spec.gpu.memory_bytes,
        }  # fmt: skip

    def answer(self, traces: Sequence[Trace]) -> Exact:
        return answer(self.as_json(), traces, self.settings or Settings())


@dataclass(frozen=True)
class Asking(Request):
    question: "Question | None" = None

    @property
    def plain(self) -> Request:
        return Request(self.spec, self.pads, self.rank, self.keeps)

    def job(self) -> dict[str, Any]:
        return {**super().job(), "question": self.question.as_json() if self.question else {}}

    def key(self) -> str:
        return self.plain.key()

    def whole(self, trace: Trace) -> Trace:
        """Return the request's own, where nobody has answered."""
        return trace if trace.answer else super().whole(trace)


def answers_for(
    plan: Plan, steps: list[StepName], settings: Settings | None, listen: Listener = lambda text: None
) -> list[Exact]:
    """Return these steps' exact memory under what the card leaves, traced side by side. Raises TraceUnavailable."""
    questions = [
        Question(
            tuple(requests_for(plan.spec(step))),
            plan.memory_of(step),
            plan.available_bytes,
            # nanoGPT has no such option.
            capped=step == "foretrain" and plan.available_reason == "memory_limit",
            settings=settings,
        )
        for step in steps
    ]
    return answered(questions, listen)


def answered(questions: Sequence[Question], listen: Listener) -> list[Exact]:
    """Return the answers, from the cache where known, each made while others are traced. Raises TraceUnavailable."""
    answers = {number: service.recalled(each.key(), Exact) for number, each in enumerate(questions)}
    asked = [(n, request) for n, each in enumerate(questions) if answers[n] is None for request in each.asked()]
    if len({request.key() for _, request in asked}) < len(asked):  # several questions about one trace
        asked = [(n, each.plain if isinstance(each, Asking) else each) for n, each in asked]
    there: dict[int, dict[int, Trace]] = {}  # of each question, by the place of the request

    def ready(place: int, trace: Trace) -> None:
        number, question = asked[place][0], questions[asked[place][0]]
        if trace.answer:
            answers[number] = service.keep(question.key(), Exact.from_json(trace.answer))
            return
        own = there.setdefault(number, {})
        own[place] = trace
        if len(own) == len(question.requests):
            answers[number] = service.keep(question.key(), question.answer([own[at] for at in sorted(own)]))

    if asked:
        for place, trace in enumerate(service.traces([request for _, request in asked], listen, ready)):
            if answers[asked[place][0]] is None:  # its worker did not answer
                ready(place, trace)
    return [answer for answer in answers.values() if answer is not None]


class RanksExact(Record):
    """The exact memory of the ranks of a shared step that can need most or least. `reason`: why it was not traced."""

    ranks: tuple[int, ...] = ()
    exact: tuple[Exact, ...] = ()  # of each of them
    reason: str = ""

    @property
    def worst(self) -> Exact | None:
        return max(self.exact, key=lambda each: each.memory.needed_bytes, default=None)


def ranks_to_trace(spec: StepSpec) -> tuple[int, ...]:
    """Return rank 0, and where shares are uneven another: the last, which has least, or that with most of ZeRO-1's."""
    sharing, parameters = spec.sharing, list(ModelShape.of(spec.config).parameters())
    if sharing is None or sharing.strategy == "ddp":
        return (0,)
    if sharing.way.shards_weights:
        uneven = any(parameter.shape[0] % sharing.shards for parameter in parameters)
        return (0, sharing.world - 1) if uneven else (0,)
    sizes = [sum(p.numel for p in each) for each in dealt(parameters, sharing.world)]
    return tuple(sorted({0, sizes.index(max(sizes))}))


def trace_ranks(
    asked: Sequence[tuple[StepSpec, RunMemory]],
    available_bytes: int | None,
    *,
    capped: bool = False,
    settings: Settings | None = None,
    listen: Listener = lambda text: None,
) -> list[RanksExact]:
    """Return each shared step's exact memory, or why it was not traced. `asked`: each step with its estimate."""
    ranks = [ranks_to_trace(spec) for spec, _ in asked]
    questions = [
        [Question(tuple(requests_for(spec, rank)), estimate, available_bytes, capped, settings) for rank in its]
        for (spec, estimate), its in zip(asked, ranks, strict=True)
    ]
    try:
        found = iter(answered([each for its in questions for each in its], listen))
        return [RanksExact(ranks=its, exact=tuple(islice(found, len(its)))) for its in ranks]
    except TraceUnavailable as error:
        if len(asked) == 1:
            return [RanksExact(reason=str(error))]
    return [  # which of them was it?
        trace_ranks([each], available_bytes, capped=capped, settings=settings, listen=listen)[0] for each in asked
    ]
