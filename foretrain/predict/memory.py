"""The ledger: how much memory a run takes in each phase, by component, each with its formula. No torch.

Two ways to write the step are predicted: nanoGPT's own (logits returned and kept) and foretrain's (only the loss),
each eager or compiled. Against traces on fake CUDA tensors and against PyTorch's real CPU allocator the allocated
peak is exact to about 0.1 % (eager) and 2 % (compiled); docs/memory.md has the tables.

Known limits: reserved memory is a range taken from allocator replays, not a replay of this run; the CUDA context is
a prior until it is measured on the card; see also the limits named in `eager_forward.py` and `inductor.py`.
"""

from typing import Literal

from foretrain.config import RunConfig
from foretrain.hardware import Dtype, Gpu
from foretrain.predict.allocator_settings import Settings
from foretrain.predict.reserved import reserved_bytes
from foretrain.predict.simulated_run import SimulatedRun, StepName, resume, staged_bytes
from foretrain.predict.timeline import Kind, Peak, Timeline
from foretrain.records import Record
from foretrain.units import MIB

Verdict = Literal["fits", "tight", "does_not_fit"]

# Of what the replay says is reserved; benchmarks/reserved.py compares it with traces.
RESERVED_LOW, RESERVED_HIGH = 0.97, 1.03
# Compiled, what the math path of attention allocates is known less well: traces came out 6 % lower to 17 % higher.
ROUGHLY = (0.94, 1.05, 1.2)
# CUDA context and loaded kernels: 0.13 GiB (RTX A2000) to 0.62 GiB (RTX 5090) reported, about 0.25 on an RTX 4070.
CONTEXT_LOW_BYTES, CONTEXT_EXPECTED_BYTES, CONTEXT_HIGH_BYTES = 133 * MIB, 300 * MIB, 700 * MIB
LATER_KERNELS_BYTES = 64 * MIB  # modules that a run loads and the calibration did not; an allowance, not measured
# On a CPU the same line is the interpreter with torch loaded, and glibc keeps less slack than CUDA's allocator.
CPU_BASE_LOW_BYTES, CPU_BASE_EXPECTED_BYTES, CPU_BASE_HIGH_BYTES = 150 * MIB, 300 * MIB, 600 * MIB
CPU_SLACK_EXPECTED, CPU_SLACK_HIGH = 1.05, 1.25
STAGING_SPARE = 1.25  # of the copy that a save makes has to be free, else it makes none: run/saver.py

PHASES = ("evaluate_first", "first_step", "steady_step", "evaluate_later", "resume")


class Context(Record):
    """What a process holds on a card beside PyTorch's allocator: the CUDA context and loaded kernels.

    A range of what others published; measured where `foretrain calibrate` ran on the card.
    """

    low_bytes: int = CONTEXT_LOW_BYTES
    expected_bytes: int = CONTEXT_EXPECTED_BYTES
    high_bytes: int = CONTEXT_HIGH_BYTES
    voice: Literal["published", "calibrated"] = "published"

    @classmethod
    def of(cls, gpu: Gpu) -> "Context":
        """The card's own, give or take the kernels that a run loads later, or the published range."""
        measured = gpu.calibration.context_bytes if gpu.calibration else None
        if measured is None:
            return cls()
        return cls(
            low_bytes=measured, expected_bytes=measured, high_bytes=measured + LATER_KERNELS_BYTES, voice="calibrated"
        )


class Component(Record):
    """One row of the ledger: what holds the bytes at the phase's peak, and the formula they follow from."""

    id: str
    size_bytes: int
    formula: str


class PhaseMemory(Record):
    """The highest moment of a phase. `needed` is what nvidia-smi shows for the process: reserved + context.

    `reserved_bytes`: what torch.cuda.max_memory_reserved will say; None on a CPU.
    """

    phase: str
    moment: str
    allocated_bytes: int
    needed_low_bytes: int
    needed_expected_bytes: int
    needed_high_bytes: int
    components: tuple[Component, ...]
    verdict: Verdict | None = None
    reserved_bytes: int | None = None


class StepMemory(Record):
    """The phases of one way to run the step. `source` is the figure's voice."""

    step: StepName
    compiled: bool
    phases: tuple[PhaseMemory, ...]
    saved_bytes: int  # what autograd keeps of one micro-batch between its forward and its backward pass
    source: str = "predicted (ledger)"
    context: Context = Context()

    @property
    def worst(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    def phase(self, name: str) -> PhaseMemory:
        return next(phase for phase in self.phases if phase.phase == name)


def _formula(tensor: Kind, count: int) -> str:
    coefficient, *factors = tensor.size.formula.split("·")
    text = tensor.size.formula if coefficient != "1" else "·".join(factors)
    return text if count == 1 else f"{count} × {text}"


def components(peak: Peak, n_params: int) -> tuple[Component, ...]:
    """The rows of a peak, largest first; the formula lists every kind of tensor that is alive."""
    rows: dict[str, list[tuple[Kind, int]]] = {}
    for tensor, count in peak.alive.items():
        rows.setdefault(tensor.component, []).append((tensor, count))
    found = []
    for id, tensors in rows.items():
        tensors.sort(key=lambda pair: -pair[0].size.nbytes * pair[1])
        formula = " + ".join(_formula(*pair) for pair in tensors[:5])
        if len(tensors) > 5:
            formula += " + …"
        size = sum(tensor.size.nbytes * count for tensor, count in tensors)
        if id == "gradients" and abs(size / (4 * n_params) - 1) < 0.001:  # all of them, but for rounding
            formula = "4·P"
        if size:
            found.append(Component(id=id, size_bytes=size, formula=formula))
    return tuple(sorted(found, key=lambda row: -row.size_bytes))


def _needed(held_bytes: int, context: Context | None, roughly: bool) -> tuple[int, int, int]:
    """Of what a card's allocator reserves, or of what is allocated on a CPU, where there is no context."""
    if context is None:
        base = (CPU_BASE_LOW_BYTES, CPU_BASE_EXPECTED_BYTES, CPU_BASE_HIGH_BYTES)
        slack = (1.0, CPU_SLACK_EXPECTED, CPU_SLACK_HIGH)
    else:
        base = (context.low_bytes, context.expected_bytes, context.high_bytes)
        slack = (RESERVED_LOW, 1.0, RESERVED_HIGH)
    if roughly:
        slack = tuple(s * r for s, r in zip(slack, ROUGHLY, strict=True))
    low, expected, high = (round(held_bytes * s) + b for s, b in zip(slack, base, strict=True))
    return low, expected, high


def _reserved(run: SimulatedRun, resumed: Timeline) -> dict[str, int]:
    """What PyTorch's allocator reserves in each phase, with the settings that the config gives it."""
    settings = Settings.parse(run.config.allocator_settings)
    return reserved_bytes(run.t, settings) | reserved_bytes(resumed, settings)


def judge(phase: PhaseMemory, available_bytes: int | None) -> Verdict | None:
    """fits: the expected need and 200 MiB of it to spare; does_not_fit: not even the low end does; else tight."""
    if available_bytes is None:
        return None
    if phase.needed_low_bytes > available_bytes:
        return "does_not_fit"
    return "fits" if phase.needed_expected_bytes + 200 * MIB <= available_bytes else "tight"


def predict(
    config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, *, compiled: bool, available_bytes: int | None
) -> StepMemory:
    """The ledger of a run on a device. `available_bytes`: what the process may take there, context included."""
    run, context = SimulatedRun(config, gpu, dtype, step, compiled), Context.of(gpu)
    peaks = run.peaks() | (resumed := resume(run)).peaks
    cpu = gpu.kind == "cpu"
    reserved = {} if cpu else _reserved(run, resumed)
    saves_beside_steps = cpu and step == "foretrain" and config.max_iters > config.eval_interval
    names = [name for name in PHASES if not (config.eval_only and name != "evaluate_first")]
    phases = []
    for name in names:
        peak = peaks[name]
        held = peak.nbytes if cpu else reserved[name]
        low, expected, high = _needed(held, None if cpu else context, compiled and run.writes_scores)
        if name == "steady_step" and saves_beside_steps:
            high += (copy := staged_bytes(run))
            if available_bytes is None or expected + round(STAGING_SPARE * copy) <= available_bytes:
                expected += copy
        phase = PhaseMemory(
            phase=name, moment=peak.moment, allocated_bytes=peak.nbytes, needed_low_bytes=low,
            needed_expected_bytes=expected, needed_high_bytes=high, components=components(peak, run.symbols["P"]),
            reserved_bytes=reserved.get(name),
        )  # fmt: skip
        phases.append(phase.model_copy(update={"verdict": judge(phase, available_bytes)}))
    return StepMemory(step=step, compiled=compiled, phases=tuple(phases), saved_bytes=run.saved_bytes, context=context)


def worst_verdict(memory: StepMemory) -> Verdict | None:
    """The verdict of the whole run: that of its worst phase."""
    order: list[Verdict | None] = ["does_not_fit", "tight", "fits", None]
    return min((phase.verdict for phase in memory.phases), key=order.index)
