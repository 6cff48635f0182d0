"""The estimate: a run's memory in each phase, by component, each with its formula; reserved memory by replay.
max-autotune, memory budgets and what padded matmuls keep are not modelled. No torch."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.process_memory import collected_later
from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.config.options import named
from foretrain.hardware.devices import Context
from foretrain.predict.abstract.tensors import one_thread_at_a_time
from foretrain.predict.allocator.blocks import Lifetimes
from foretrain.predict.allocator.replay import PhasePeak, Tried, replay
from foretrain.predict.allocator.settings import Settings, of_run
from foretrain.predict.estimate.simulated_run import SimulatedRun, resume, staged_bytes
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.timeline import Kind, Peak

# A need's range against what the device gives. fits: all is within, and 200 MiB beside what is expected. tight: the
# high end is not, or the replay lives by freeing caches. may_not_fit: only the low end is. does_not_fit: not even that.
Verdict = Literal["fits", "tight", "may_not_fit", "does_not_fit", "does_not_run"]
# The worst first. does_not_run: the card cannot do what the run asks for, however much memory there is.
VERDICTS: tuple[Verdict | None, ...] = ("does_not_run", "does_not_fit", "may_not_fit", "tight", "fits", None)
REFUSED, FAILING = VERDICTS[:2], VERDICTS[:3]  # what is certain to end; what fails --check

# Of what the replay says is reserved, eager and compiled; benchmarks/reserved.py compares it with traces.
RESERVED = {False: (0.99, 1.0, 1.02), True: (0.99, 1.0, 1.06)}
# Compiled, what the math path of attention allocates is known less well: traces came out 6% lower to 17% higher.
Roughly = tuple[float, float, float]
ROUGHLY: Roughly = (0.94, 1.05, 1.2)
EXACTLY: Roughly = (1.0, 1.0, 1.0)
# On a CPU the same line is the interpreter with torch loaded, and glibc keeps less slack than CUDA's allocator.
CPU_BASE_LOW_BYTES, CPU_BASE_EXPECTED_BYTES, CPU_BASE_HIGH_BYTES = 150 * MIB, 300 * MIB, 600 * MIB
CPU_SLACK_EXPECTED, CPU_SLACK_HIGH = 1.05, 1.25
STAGING_SPARE = 1.25  # of the copy that a save makes has to be free, else it makes none: training/saver.py

MARGIN_BYTES = 200 * MIB  # what "fits" leaves to spare beside the expected context
# What of a config shapes the memory of a step by its very value. What else does is kept by what it comes to.
SHAPING_OPTIONS = named(lambda option: "memory" in option.affects and not option.by_effect)
MOST_KEPT = 512  # estimates, of up to a quarter of a megabyte each
PHASES = ("evaluate_first", "first_step", "steady_step", "evaluate_steady", "resume")


class Component(Record):
    """One row of the estimate: what holds the bytes at the phase's peak, and the formula they follow from."""

    id: str
    size_bytes: int
    formula: str


class PhaseMemory(Record):
    """The highest moment of a phase; `needed` is what nvidia-smi shows for the process: reserved + context."""

    phase: str
    moment: str
    allocated_bytes: int
    needed_low_bytes: int
    needed_expected_bytes: int
    needed_high_bytes: int
    components: tuple[Component, ...]
    verdict: Verdict | None = None
    reserved_bytes: int | None = None

    @property
    def tensors_bytes(self) -> int:
        """The tensors themselves, without what the allocator's blocks are larger by."""
        return self.allocated_bytes - self.bytes_of("rounding")

    def bytes_of(self, id: str) -> int:
        return sum(row.size_bytes for row in self.components if row.id == id)

    @property
    def needed_span(self) -> tuple[int, int, int]:
        """Return (low, expected, high) of the need where there is room; with less, caches are freed."""
        return self.needed_low_bytes, self.needed_expected_bytes, self.needed_high_bytes


class RunMemory(Record):
    """The phases of a run of any kind, in order. `saved_bytes`: what autograd keeps of one micro-batch; `paged_bytes`:
    optimizer states in managed memory, outside the allocator; `obstacle`: what the card cannot do (does_not_run)."""

    phases: tuple[PhaseMemory, ...]
    saved_bytes: int = 0
    source: str = "estimated"
    context: Context = Context()
    paged_bytes: int = 0
    step: StepName | None = None
    compiled: bool = False
    obstacle: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """Whether the run fits, by its worst phase; None where the memory to fit in is not known."""
        if self.obstacle:
            return "does_not_run"
        verdicts: list[Verdict | None] = [phase.verdict for phase in self.phases]
        return min(verdicts, key=VERDICTS.index)

    @property
    def worst(self) -> PhaseMemory:
        """The phase with the most bytes of tensors; what the card needs can be most in another (`neediest`)."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    @property
    def neediest(self) -> PhaseMemory:
        """The phase that is expected to need most; of equal ones that with the most bytes of tensors."""
        return max(self.phases, key=lambda phase: (phase.needed_expected_bytes, phase.allocated_bytes))

    @property
    def needed_bytes(self) -> int:
        return self.neediest.needed_expected_bytes

    @property
    def not_reached(self) -> tuple[str, ...]:
        """Phases behind the one that does not fit. Resume is another process, so it is reached."""
        names = [phase.phase for phase in self.phases if phase.phase != "resume"]
        ends = [phase.phase for phase in self.phases if phase.verdict == "does_not_fit" and phase.phase != "resume"]
        return tuple(names[names.index(ends[0]) + 1 :]) if ends else ()

    def phase(self, name: str) -> PhaseMemory:
        """Return the memory of this phase. Raises StopIteration where the run has none of this name."""
        return next(phase for phase in self.phases if phase.phase == name)


def _formula(tensor: Kind, count: int) -> str:
    coefficient, *factors = tensor.size.formula.split("·")
    text = tensor.size.formula if coefficient != "1" else "·".join(factors)
    return text if count == 1 else f"{count} × {text}"


def gathered(formula: str) -> str:
    """'12 × 8·B·T·C + 13 × 2·B·T·C + 4·T·C' -> '122·B·T·C + 4·T·C', where there are more than two terms."""
    terms = formula.split(" + ")
    if len(terms) < 3:
        return formula
    factors: Counter[str] = Counter()
    for term in terms:
        parts = re.split("·| × ", term)
        names = "·".join(part for part in parts if not part.replace(",", "").isdigit())
        factors[names] += math.prod(int(part.replace(",", "")) for part in parts if part.replace(",", "").isdigit())
    return " + ".join(f"{factor:,}·{names}" if names else f"{factor:,}" for names, factor in factors.items())


def components(peak: Peak, n_params: int, most_terms: int | None = 5) -> tuple[Component, ...]:
    """Return the rows of a peak, largest first, with formulas by tensors, or by sizes beyond `most_terms`."""
    rows: dict[str, list[tuple[Kind, int]]] = {}
    for tensor, count in peak.alive.items():
        rows.setdefault(tensor.component, []).append((tensor, count))
    found = []
    for id, tensors in rows.items():
        tensors.sort(key=lambda pair: -pair[0].size.nbytes * pair[1])
        formula = " + ".join(_formula(*pair) for pair in tensors)
        if most_terms is not None and len(tensors) > most_terms:
            formula = gathered(formula)
        size = sum(tensor.size.nbytes * count for tensor, count in tensors)
        if id == "gradients" and abs(size / (4 * n_params) - 1) < 0.001:  # all of them, but for rounding
            formula = "4·P"
        if size:
            found.append(Component(id=id, size_bytes=size, formula=formula))
    return tuple(sorted(found, key=lambda row: -row.size_bytes))


class Room:
    """What the allocator may take beside a context. `roughly`: the replay's error; `capped`: by the trainer."""

    capped = False

    def __init__(
        self, settings: Settings, context: Context, roughly: Roughly = EXACTLY, *, compiled: bool = False
    ) -> None:
        self.settings, self.context, self.roughly, self.compiled = settings, context, roughly, compiled

    def limits(self, available_bytes: int, card_bytes: int | None, context: Context | None = None) -> tuple[int, int]:
        """Return what the allocator may take at the range's low end and at what is expected."""
        held = context or self.context
        low, expected, _ = self.roughly
        at_low = round((available_bytes - held.low_bytes) / (low * RESERVED[self.compiled][0]))
        at_expected = round((available_bytes - held.expected_bytes) / expected)
        cap = self.cap_bytes(card_bytes)
        return (at_low, at_expected) if cap is None else (min(at_low, cap), min(at_expected, cap))

    def cap_bytes(self, card_bytes: int | None) -> int | None:
        return None if self.capped or card_bytes is None else self.settings.cap_bytes(card_bytes)


class Fit:
    """Whether a run's events live in a room. `names`: the phases that it comes to."""

    def __init__(self, events: Lifetimes, room: Room, names: Sequence[str]) -> None:
        self.events, self.room, self.names = events, room, names
        self._failed_phases: dict[int, str | None] = {}  # by limit
        self._tried = Tried(events, room.settings, physical=True)

    def judged(
        self,
        phases: Sequence[PhaseMemory],
        training: Sequence[PhaseMemory],
        available_bytes: int,
        card_bytes: int | None,
        context: Context | None = None,
        at_best: "tuple[Fit, Sequence[PhaseMemory]] | None" = None,
    ) -> tuple[PhaseMemory, ...]:
        """Judge the phases; `at_best`: of a run that takes less where the card is in time, so that it may live."""
        limits = self.room.limits(available_bytes, card_bytes, context)
        dead = [self.runs_out_in(limit, training) for limit in limits]
        if dead[0] and at_best and at_best[0].runs_out_in(limits[0], at_best[1]) is None:
            dead[0] = None
        least = {phase.phase: phase.tensors_bytes for phase in at_best[1]} if at_best else {}
        if (cap := self.room.cap_bytes(card_bytes)) is not None:
            available_bytes = min(available_bytes, cap + (context or self.room.context).high_bytes)
        return judged(phases, available_bytes, dead[0] or dead[1], dead[0] is not None, limits, least)

    @one_thread_at_a_time
    def runs_out_in(self, limit_bytes: int, phases: Sequence[PhaseMemory]) -> str | None:
        """The phase in which the allocator cannot serve a request under a limit; None where the run lives."""
        if limit_bytes not in self._failed_phases:
            self._failed_phases[limit_bytes] = self._replayed_under(limit_bytes, phases)
        return self._failed_phases[limit_bytes]

    def _replayed_under(self, limit_bytes: int, phases: Sequence[PhaseMemory]) -> str | None:
        if all((phase.reserved_bytes or 0) <= limit_bytes for phase in phases):
            return None
        too_much = next((phase.phase for phase in phases if phase.tensors_bytes > limit_bytes), None)
        if too_much is None:
            failure = self._tried.failure(limit_bytes)
            # What is freed while the model is built reaches no phase: it never gets into the first one.
            too_much = None if failure is None else self.names[0] if failure.phase == "build" else failure.phase
        return too_much if too_much in self.names else None  # eval_only never comes to training


class _Simulated(NamedTuple):
    peaks: dict[str, Peak]
    events: Lifetimes
    resumed: Lifetimes
    n_params: int
    saved_bytes: int
    staged_bytes: int


class MemoryEstimate:
    """The memory of one way to run the step, by its `key`, simulated at need, judged for any card of its kind."""

    def __init__(self, asked: "Asked") -> None:
        spec = asked.spec
        self.key, self.spec = asked.key, spec
        self._keeps, self._saves = asked.keeps, asked.saves
        self.context, self.settings = _context_of(spec), _settings_of(spec)
        scores = "math" in (spec.variant.attention, spec.variant.evaluation_attention)
        self.roughly = ROUGHLY if spec.compiled and scores else EXACTLY
        self.room = Room(self.settings, self.context, self.roughly, compiled=spec.compiled)
        self.room.capped = spec.config.memory_limit_bytes is not None
        self._names = [name for name in PHASES if not (spec.config.eval_only and name != "evaluate_first")]
        self._begun: SimulatedRun | None = None  # one whose first evaluation is done
        self._simulated: _Simulated | None = None
        self._first_bytes: int | None = None  # the tensors at the highest moment of that

    def _begin(self) -> SimulatedRun:
        run = SimulatedRun(self.spec, keeps=self._keeps)
        with collected_later():
            run.begin()
        return run

    @property
    @one_thread_at_a_time
    def _run(self) -> _Simulated:
        if self._simulated is None:
            run, self._begun = self._begun or self._begin(), None
            with collected_later():
                peaks = run.finish() | (resumed := resume(run)).peaks
            staged = staged_bytes(run) if self._saves else 0
            self._simulated = _Simulated(peaks, run.t.packed(), resumed, run.symbols["P"], run.saved_bytes, staged)
        return self._simulated

    @one_thread_at_a_time
    def _begins_within(self, limit_bytes: int) -> bool:
        """Whether the tensors of the first evaluation do, which is known before the rest is simulated."""
        if self._first_bytes is None:
            run = self._begin()
            self._first_bytes = run.t.peaks["evaluate_first"].nbytes
            if self._first_bytes <= limit_bytes:  # else nobody is likely to ask on, and it takes memory
                self._begun = run
        return self._first_bytes <= limit_bytes

    @property
    def peaks(self) -> dict[str, Peak]:
        return self._run.peaks

    @property
    def events(self) -> Lifetimes:
        return self._run.events

    @property
    def tensors_bytes(self) -> int:
        return max(self.peaks[name].nbytes for name in self._names)

    @cached_property
    def fit(self) -> Fit:
        return Fit(self.events, self.room, self._names)

    @cached_property
    def _at_best(self) -> "MemoryEstimate | None":
        """The same run where NCCL has let go of DDP's first buckets in time, which only the card can tell."""
        sharing = self.spec.sharing
        unsure = self._keeps and self.spec.cuda and sharing is not None and not sharing.way.shards_weights
        return estimated(self.spec, keeps=False) if unsure else None

    @cached_property
    def memory(self) -> RunMemory:
        """Without verdicts. What the allocator holds is replayed when it is first asked for."""
        events = () if not self.spec.cuda else (self.events, self._run.resumed)
        blocks = {peak.phase: peak for part in events for peak in replay(part, self.settings).phases}
        phases = tuple(self._phase(name, blocks.get(name), self._run.n_params) for name in self._names)
        return RunMemory(
            step=self.spec.step,
            compiled=self.spec.compiled,
            phases=phases,
            saved_bytes=self._run.saved_bytes,
            context=self.context,
            obstacle=self.spec.obstacle,
        )

    def fits(self, available_bytes: int | None, card_bytes: int | None = None) -> bool:
        """Return whether `judged` finds that every phase fits, or cannot judge: a search asks this much more often."""
        if self.spec.cuda and available_bytes is not None and self.is_beyond(available_bytes, card_bytes):
            return False
        return self.judged(available_bytes, card_bytes).verdict in ("fits", None)

    def is_beyond(self, available_bytes: int, card_bytes: int | None) -> bool:
        """Whether the tensors alone are more than what is there."""
        least = min(self.room.limits(available_bytes, card_bytes))
        return not self._begins_within(least) or self.tensors_bytes > least

    @property
    def _training(self) -> tuple[PhaseMemory, ...]:
        return tuple(phase for phase in self.memory.phases if phase.phase != "resume")

    def _phase(self, name: str, held: PhasePeak | None, n_params: int) -> PhaseMemory:
        peak = self.peaks[name]
        rows, allocated, reserved = components(peak, n_params), peak.nbytes, None
        if held is not None:
            allocated, reserved = max(peak.nbytes, held.allocated_bytes), held.reserved_bytes
            if rest := allocated - peak.nbytes:
                rows = (*rows, Component(id="rounding", size_bytes=rest, formula=""))
        low, expected, high = self._needed(name, allocated, reserved, self.context)
        return PhaseMemory(
            phase=name, moment=peak.moment, allocated_bytes=allocated, needed_low_bytes=low,
            needed_expected_bytes=expected, needed_high_bytes=high, components=rows, reserved_bytes=reserved,
        )  # fmt: skip

    def _needing(self, phase: PhaseMemory, context: Context) -> PhaseMemory:
        low, expected, high = self._needed(phase.phase, phase.allocated_bytes, phase.reserved_bytes, context)
        need = {"needed_low_bytes": low, "needed_expected_bytes": expected, "needed_high_bytes": high}
        return phase.model_copy(update=need)

    def _needed(self, name: str, allocated: int, reserved: int | None, context: Context) -> tuple[int, int, int]:
        """(low, expected, high) of a phase; the low end is that of a run which takes less where the card is in time."""
        low, expected, high = needed(allocated, reserved, context, self.roughly, compiled=self.spec.compiled)
        if best := self._at_best:
            least = best.memory.phase(name)
            low = min(low, best._needed(name, least.allocated_bytes, least.reserved_bytes, context)[0])
        return low, expected, high

    def judged(
        self, available_bytes: int | None, card_bytes: int | None = None, context: Context | None = None
    ) -> RunMemory:
        """Judge what the process may take, context included. `card_bytes`: the base of per_process_memory_fraction."""
        phases = self.memory.phases
        if context is not None:
            phases = tuple(self._needing(phase, context) for phase in phases)
        if not self.spec.cuda:
            phases = tuple(on_cpu(self._with_copy(phase, available_bytes), available_bytes) for phase in phases)
        elif available_bytes is not None:
            best = self._at_best
            at_best = (best.fit, best._training) if best else None
            phases = self.fit.judged(phases, self._training, available_bytes, card_bytes, context, at_best)
        return self.memory.model_copy(update={"phases": phases})

    def _with_copy(self, phase: PhaseMemory, available_bytes: int | None) -> PhaseMemory:
        """Later steps beside the copy that a save makes, if there is room for it; a run without room makes none."""
        copy = self._run.staged_bytes if phase.phase == "steady_step" else 0
        expected = phase.needed_expected_bytes
        if available_bytes is None or expected + round(STAGING_SPARE * copy) <= available_bytes:
            expected += copy
        high = phase.needed_high_bytes + copy
        return phase.model_copy(update={"needed_expected_bytes": expected, "needed_high_bytes": high})


def _context_of(spec: StepSpec) -> Context:
    context, c = Context.of(spec.gpu), spec.config
    if spec.is_one_graph:
        return context.with_streams(c.n_layer * (c.gradient_accumulation_steps + 1))  # and those of an evaluation
    return context.with_streams() if spec.copies_beside else context


def _settings_of(spec: StepSpec) -> Settings:
    """The allocator's, as the config has them; what the environment says beside them only a trace reads."""
    try:
        return replace(of_run(spec.config.allocator_settings, {}), reuses_oldest=spec.torch.reuses_oldest)
    except ValueError as error:
        raise UserError("usage.alloc_conf", problem=str(error)) from None


def needed(
    allocated: int, reserved: int | None, context: Context, roughly: Roughly = EXACTLY, *, compiled: bool = False
) -> tuple[int, int, int]:
    """(low, expected, high) of what nvidia-smi shows for the process, or a CPU's resident memory."""
    if reserved is None:
        base = (CPU_BASE_LOW_BYTES, CPU_BASE_EXPECTED_BYTES, CPU_BASE_HIGH_BYTES)
        slack = (1.0, CPU_SLACK_EXPECTED, CPU_SLACK_HIGH)
    else:
        base = (context.low_bytes, context.expected_bytes, context.high_bytes)
        slack = RESERVED[compiled]
    held = allocated if reserved is None else reserved
    low, expected, high = (round(held * s * r) + b for s, r, b in zip(slack, roughly, base, strict=True))
    return low, expected, high


def of_range(span: tuple[int, int, int], available_bytes: int) -> Verdict:
    low, expected, high = span
    if max(high, expected + MARGIN_BYTES) <= available_bytes:
        return "fits"
    return "tight" if expected <= available_bytes else "may_not_fit" if low <= available_bytes else "does_not_fit"


def on_cpu(phase: PhaseMemory, available_bytes: int | None) -> PhaseMemory:
    verdict = None if available_bytes is None else of_range(phase.needed_span, available_bytes)
    return phase.model_copy(update={"verdict": verdict})


def judged(
    phases: Sequence[PhaseMemory],
    available_bytes: int,
    dead: str | None,
    certain: bool,
    limits: tuple[int, int],
    least: Mapping[str, int] = MappingProxyType({}),
) -> tuple[PhaseMemory, ...]:
    """Judge the phases. `limits`: of the allocator, at the low end and as expected; `dead`, `certain`: where the replay
    ends under one of them, under the low end's; the others are judged by their tensors, `least` at least."""
    found = []
    for phase in phases:
        size = phase.tensors_bytes
        verdict: Verdict = "fits" if of_range(phase.needed_span, available_bytes) == "fits" else "tight"
        if phase.phase == dead or size > limits[1]:
            verdict = "may_not_fit"
        if (phase.phase == dead and certain) or least.get(phase.phase, size) > limits[0]:
            verdict = "does_not_fit"
        found.append(phase.model_copy(update={"verdict": verdict}))
    return tuple(found)


def carried(phases: Sequence[PhaseMemory]) -> tuple[PhaseMemory, ...]:
    """Give each phase the worst verdict of those before it that need no more, as the allocator keeps what they had."""
    found: list[PhaseMemory] = []
    for phase in phases:
        before = [one.verdict for one in found if one.needed_expected_bytes <= phase.needed_expected_bytes]
        worst = min((*before, phase.verdict), key=VERDICTS.index)
        found.append(phase.model_copy(update={"verdict": worst}))
    return tuple(found)


def predict(spec: StepSpec, available_bytes: int | None = None) -> RunMemory:
    """The estimate of a run of this step. `available_bytes`: what the process may take there, context included."""
    return estimated(spec).judged(available_bytes, spec.gpu.memory_bytes)


def estimated(spec: StepSpec, *, keeps: bool = True) -> MemoryEstimate:
    """Estimate a run on cards of this kind, and keep the last ones. `keeps`: as of SimulatedRun."""
    return _made(Asked(spec, keeps=keeps))


class Asked:
    """A question, whose answer depends on `key`. `saves`: a save on a CPU copies the state."""

    def __init__(self, spec: StepSpec, *, keeps: bool = True) -> None:
        self.spec, self.keeps = spec, keeps
        c, gpu = spec.config, spec.gpu
        self.saves = not spec.cuda and spec.step == "foretrain" and c.max_iters > c.eval_interval
        self.key = (
            *(getattr(c, option) for option in SHAPING_OPTIONS), c.eval_batch, c.eval_block, c.allocator_settings,
            spec.micro_batches_that_count, c.memory_limit_bytes is not None, self.saves, spec.compiled,
            spec.step, spec.dtype, gpu.kind, gpu.capability, gpu.cache_bytes if spec.compiled else gpu.sm_count,
            _context_of(spec), spec.sharing, keeps, spec.is_one_graph, spec.torch.reuses_oldest, spec.obstacle,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=MOST_KEPT)
def _made(asked: Asked) -> MemoryEstimate:
    return MemoryEstimate(asked)
