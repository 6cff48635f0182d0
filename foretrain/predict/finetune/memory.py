"""The memory of a fine-tuning run: each phase with its components and a verdict. No torch."""

from functools import lru_cache

from foretrain.base.process_memory import collected_later
from foretrain.base.records import Record
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import Context
from foretrain.predict import software
from foretrain.predict.allocator.replay import PhasePeak, replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.simulated import PHASES, SimulatedFineTuning
from foretrain.predict.memory import (
    EXACTLY,
    Component,
    Fit,
    Phased,
    PhaseMemory,
    Room,
    Roughly,
    carried,
    components,
    needed,
    on_cpu,
)
from foretrain.predict.timeline import Peak

MOST_KEPT = 128
# Which freed blocks are found again changes with torch, kernels and system, which a plan does not know. 11 runs on an
# RTX 4080 (Windows, torch 2.6; DaoyuanLi2816/can-i-finetune-this@053ce9e, benchmarks/results) reserved 9% less to 12%
# more than the replay; with the versions of the plan 91 runs on an H100 were within 1% (gpu_h100_finetune.json).
OTHER_SOFTWARE: Roughly = (0.92, 1.0, 1.1)  # times RESERVED


class FineTuneMemory(Phased, Record):
    """The phases of a run in their order. `source`: estimated or traced. `paged_bytes`: optimizer states in managed
    memory, which moves between the card and the computer and is not in the allocator."""

    phases: tuple[PhaseMemory, ...]
    saved_bytes: int  # what autograd keeps of one micro-batch between its forward and its backward pass
    source: str = "estimated"
    context: Context = Context()
    paged_bytes: int = 0


class FineTuneLedger:
    """The memory of one way to fine-tune a model, without verdicts; `judged` gives them for a card's free memory."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        self.context, self.cuda = Context.of(gpu), gpu.kind == "cuda"
        with collected_later():
            run = SimulatedFineTuning(facts, tune, gpu)
            timeline = run.write()
        events, settings = timeline.packed(), Settings()
        held = {peak.phase: peak for peak in replay(events, settings).phases}
        names = [name for name in PHASES if name in timeline.peaks]
        self.fit = Fit(events, Room(settings, self.context), names)
        self.symbols = dict(run.symbols)
        self.alive = {name: tuple(timeline.peaks[name].alive.items()) for name in names}
        self.weights, self.packed = run.program.weights, run.program.packed
        self.n_trained = sum(parameter.numel() for parameter in run.trained)
        self.gradient_dtypes = tuple(sorted({parameter.dtype.name for parameter in run.trained}))
        self.n_params = sum(parameter.numel() for parameter in run.program.weights.values())
        self.n_params += sum(n_out * n_in for n_out, n_in in run.program.packed.values()) + run.program.n_original
        phases = tuple(self._phase(name, timeline.peaks[name], held[name]) for name in names)
        self.memory = FineTuneMemory(
            phases=phases, saved_bytes=run.saved_bytes, context=self.context, paged_bytes=run.paged_bytes
        )

    def _phase(self, name: str, peak: Peak, held: PhasePeak) -> PhaseMemory:
        rows = components(peak, self.n_trained, most_terms=None)
        allocated = max(peak.nbytes, held.allocated_bytes) if self.cuda else peak.nbytes
        reserved = held.reserved_bytes if self.cuda else None
        if rest := allocated - peak.nbytes:
            rows = (*rows, Component(id="rounding", size_bytes=rest, formula=""))
        low, expected, high = needed(allocated, reserved, self.context, OTHER_SOFTWARE if self.cuda else EXACTLY)
        least = allocated + self.context.low_bytes if self.cuda else low
        return PhaseMemory(
            phase=name, moment=peak.moment, allocated_bytes=allocated, needed_low_bytes=max(low, least),
            needed_expected_bytes=expected, needed_high_bytes=high, components=rows,
            reserved_bytes=reserved,
        )  # fmt: skip

    def judged(self, available_bytes: int | None, card_bytes: int | None = None) -> FineTuneMemory:
        """With verdicts for what the process may take, context included; without where nobody knows that."""
        if available_bytes is None:
            return self.memory
        if self.cuda:
            found = carried(self.fit.judged(self.memory.phases, self.memory.phases, available_bytes, card_bytes))
            phases = tuple(_given_back(phase, available_bytes) for phase in found)
        else:
            phases = tuple(on_cpu(phase, available_bytes) for phase in self.memory.phases)
        return self.memory.model_copy(update={"phases": phases})


def _given_back(phase: PhaseMemory, available_bytes: int) -> PhaseMemory:
    """What fits shows no more than there is: the allocator frees what it only keeps before it asks for more."""
    if phase.verdict != "fits":
        return phase
    return phase.model_copy(update={"needed_high_bytes": min(phase.needed_high_bytes, available_bytes)})


class _Asked:
    """A question; those with one `key` have one answer."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        self.facts, self.tune, self.gpu = facts, tune, gpu
        self.key = facts.model_dump_json(), tune.model_dump_json(), gpu.name, Context.of(gpu), software.of("")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key[:3])


@lru_cache(maxsize=MOST_KEPT)
def _ledger(asked: _Asked) -> FineTuneLedger:
    return FineTuneLedger(asked.facts, asked.tune, asked.gpu)


def estimated(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> FineTuneLedger:
    """The estimate of a run on this card. The last ones are kept."""
    return _ledger(_Asked(facts, tune, gpu))
