"""`FineTunePlan`: what a fine-tuning run will take on a card, as one record. Instant, without torch.

Every figure has its source: memory is *estimated* from the model's code or *traced*; time is *estimated* from the
card's rates.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.base.units import format_bytes, format_duration
from foretrain.config.finetune.options import Bound, FineTune
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.source import FOUR_BITS
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.energy import Prices
from foretrain.predict.finetune.memory import FineTuneLedger, FineTuneMemory, estimated
from foretrain.predict.finetune.notes import notes_of
from foretrain.predict.finetune.resolved import resolved
from foretrain.predict.finetune.timing import PRICES, FineTuneTiming, logged, timing
from foretrain.predict.memory import Verdict, worst_verdict

SCHEMA = "foretrain.finetune/1"


class FineTuneCounts(Record):
    """Parameters: all of the model, its adapters and its copies of modules that are trained whole, and those that are
    trained, with the dtypes of their gradients."""

    n_params: int
    n_trained: int
    gradient_dtypes: tuple[str, ...]

    @classmethod
    def of(cls, ledger: FineTuneLedger) -> "FineTuneCounts":
        """Those of a run."""
        return cls(n_params=ledger.n_params, n_trained=ledger.n_trained, gradient_dtypes=ledger.gradient_dtypes)


class FineTunePlan(Record):
    """The forecast of one model, one way to fine-tune it, one card. `bound`: what the figures are of the run's, where
    something is not planned; `bounded_by`: what that is."""

    name: str
    where: str
    facts: ModelFacts
    tune: FineTune
    gpu: Gpu
    counts: FineTuneCounts
    available_bytes: int | None
    used_by_others_bytes: int
    memory: FineTuneMemory
    timing: FineTuneTiming | None
    notes: tuple[Note, ...] = ()
    bound: Bound = "exact"
    bounded_by: tuple[str, ...] = ()

    def __repr__(self) -> str:
        room = f" of {format_bytes(self.available_bytes)}" if self.available_bytes is not None else ""
        total = self.timing.total_s if self.timing else None
        time = f", {format_duration(total.expected_s)}" if total else ""
        return (
            f"<plan of {self.name} on {self.gpu.name}: {self.verdict}, {format_bytes(self.needed_bytes)}{room}{time}>"
        )

    @property
    def needed_bytes(self) -> int:
        """What the run is expected to need on the card: reserved memory and the CUDA context."""
        return self.memory.needed_bytes

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits, by its worst phase; None where the memory to fit in is not known."""
        return worst_verdict(self.memory)


def plan(
    source: ModelSource,
    tune: FineTune,
    gpu: Gpu,
    *,
    used_by_others_bytes: int = 0,
    prices: Prices = PRICES,
    unplanned: Mapping[str, Bound] = MappingProxyType({}),
) -> FineTunePlan:
    """The forecast, on a CPU without time. `unplanned`: settings that are not planned, each with what the figures then
    are of the run's. Raises UserError where foretrain does not know the model's parts (only a
    trace can then), or the device is neither a card of CUDA's nor a CPU."""
    facts = source.facts
    if facts is None:
        raise UserError("usage.family_unknown", model=str(source.config.get("model_type")), source=source.where)
    if facts.quantization:
        four_bits = facts.quantization == FOUR_BITS
        id = "usage.four_bit_source" if four_bits else "usage.quantized_source"
        raise UserError(id, model=source.name, quantization=facts.quantization, method=tune.method)
    if gpu.kind not in ("cuda", "cpu") or not gpu.is_trained_on:
        raise UserError("usage.finetune_needs_cuda", gpu=gpu.name)
    tune = resolved(facts, tune, gpu)
    room = None if gpu.memory_bytes is None else max(0, gpu.memory_bytes - used_by_others_bytes)
    ledger = estimated(facts, tune, gpu)
    bound = bound_of([tune.bound, *unplanned.values()])
    memory = bounded(ledger.judged(room, gpu.memory_bytes), bound)
    return FineTunePlan(
        name=source.name, where=source.where, facts=facts, tune=tune, gpu=gpu, counts=FineTuneCounts.of(ledger),
        available_bytes=room, used_by_others_bytes=used_by_others_bytes, memory=memory,
        timing=_timing(facts, tune, gpu, prices) if bound == "exact" else None,
        notes=tuple(notes_of(source, facts, tune, gpu, used_by_others_bytes, ledger)), bound=bound,
        bounded_by=(*tune.bounded_by, *unplanned),
    )  # fmt: skip


def bound_of(bounds: Iterable[Bound]) -> Bound:
    """What several make of the figures together."""
    found: set[Bound] = {each for each in bounds if each != "exact"}
    return "exact" if not found else found.pop() if len(found) == 1 else "unknown"


def bounded(memory: FineTuneMemory, bound: Bound) -> FineTuneMemory:
    """The memory with those verdicts alone that are sure: what needs at least more than there is does not fit, and what
    fits with all that it needs at most, fits."""
    verdicts = [phase.verdict for phase in memory.phases]
    if bound == "exact" or (bound == "at_most" and set(verdicts) <= {"fits", None}):
        return memory
    kept = ("does_not_fit",) if bound == "at_least" else ()
    phases = [
        phase.model_copy(update={"verdict": phase.verdict if phase.verdict in kept else None})
        for phase in memory.phases
    ]
    return memory.model_copy(update={"phases": tuple(phases)})


def check_exact(plan: FineTunePlan, option: str) -> None:
    """Raises UserError where a question cannot be answered, because something of the run is not planned."""
    if plan.tune.bound_of_training != "exact":
        raise UserError("usage.finetune_training", option=option, training=plan.tune.training, example="--training sft")
    if plan.bound != "exact":
        raise UserError("usage.finetune_bounded", option=option, keys=plan.bounded_by)


def replanned(plan: FineTunePlan, **options: object) -> FineTunePlan:
    """The same with other options, at the same prices. A step time of a log was another step's: it is estimated
    again."""
    return with_time(untimed(plan, **options), plan)


def untimed(plan: FineTunePlan, **options: object) -> FineTunePlan:
    """The same with other options and without its time: a search asks for the memory of many runs. Raises UserError
    for what this model or card cannot have."""
    tune = resolved(plan.facts, FineTune.model_validate({**plan.tune.model_dump(), **options}), plan.gpu)
    ledger = estimated(plan.facts, tune, plan.gpu)
    memory = bounded(ledger.judged(plan.available_bytes, plan.gpu.memory_bytes), plan.bound)
    counts = FineTuneCounts.of(ledger)
    return plan.model_copy(update={"tune": tune, "counts": counts, "memory": memory, "timing": None})


def with_time(plan: FineTunePlan, before: FineTunePlan) -> FineTunePlan:
    """An untimed plan with its time, at the prices of the plan before."""
    if plan.bound != "exact":
        return plan
    prices = before.timing.prices if before.timing else PRICES
    return plan.model_copy(update={"timing": _timing(plan.facts, plan.tune, plan.gpu, prices)})


def timed(plan: FineTunePlan, step_s: float, prices: Prices = PRICES) -> FineTunePlan:
    """The same with the seconds of a step in a log."""
    return plan.model_copy(update={"timing": logged(plan.facts, plan.tune, plan.gpu, step_s, prices)})


def _timing(facts: ModelFacts, tune: FineTune, gpu: Gpu, prices: Prices) -> FineTuneTiming | None:
    """That of a card; of a CPU, whose rates for these models nobody has measured, none."""
    return timing(facts, tune, gpu, prices) if gpu.kind == "cuda" else None
