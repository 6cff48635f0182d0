"""The ledger: how much memory a run takes in each phase, by component, each with its formula. No torch.

Two ways to write the step are predicted: nanoGPT's own (logits returned and kept) and foretrain's (only the loss),
each eager or compiled. Against traces on fake CUDA tensors and against PyTorch's real CPU allocator the allocated
peak is exact to about 0.1 % (eager) and 2 % (compiled); docs/memory.md has the tables.

Known limits: reserved memory is a range taken from allocator replays, not a replay of this run; the CUDA context is
a prior until it is measured on the card; see also the limits named in `eager_forward.py` and `inductor.py`.
"""

from collections.abc import Callable
from typing import Literal

from foretrain.config import RunConfig
from foretrain.hardware import Dtype, Gpu
from foretrain.lm import attention_sizes
from foretrain.lm.adamw8bit_sizes import TEMPORARY_BYTES, moments_bytes
from foretrain.lm.shape import ModelShape
from foretrain.predict.attention import attention_kind
from foretrain.predict.eager import EagerStep
from foretrain.predict.eager_forward import Graph, Variant
from foretrain.predict.inductor import CompiledGraph, CompiledStep
from foretrain.predict.modern_compiled import ModernCompiledStep
from foretrain.predict.modern_eager import ModernEagerStep
from foretrain.predict.timeline import Peak, Tensor, Timeline
from foretrain.records import Record
from foretrain.units import MIB

StepName = Literal["foretrain", "nanogpt"]
Verdict = Literal["fits", "tight", "does_not_fit"]

CUDA_GRANULE = 512  # c10/core/AllocatorConfig.h, kMinBlockSize
# Reserved over allocated: replays of 11 nanoGPT configs gave 1.02 to 1.33, a logged RTX 4070 run 1.18.
RESERVED_LOW, RESERVED_EXPECTED, RESERVED_HIGH = 1.02, 1.15, 1.33
# Compiled, what the math path of attention allocates is known less well: traces came out 6 % lower to 17 % higher.
ROUGHLY = (0.94, 1.05, 1.2)
# CUDA context and loaded kernels: 0.13 GiB (RTX A2000) to 0.62 GiB (RTX 5090) reported, about 0.25 on an RTX 4070.
CONTEXT_LOW_BYTES, CONTEXT_EXPECTED_BYTES, CONTEXT_HIGH_BYTES = 133 * MIB, 300 * MIB, 700 * MIB
LATER_KERNELS_BYTES = 64 * MIB  # modules that a run loads and the calibration did not; an allowance, not measured
# On a CPU the same line is the interpreter with torch loaded, and glibc keeps less slack than CUDA's allocator.
CPU_BASE_LOW_BYTES, CPU_BASE_EXPECTED_BYTES, CPU_BASE_HIGH_BYTES = 150 * MIB, 300 * MIB, 600 * MIB
CPU_SLACK_EXPECTED, CPU_SLACK_HIGH = 1.05, 1.25
STAGING_SPARE = 1.25  # of the copy that a save makes has to be free, else it makes none: run/saver.py

SAVED_COMPONENTS = ("activations", "logits", "weight_copies", "batch")
# A chunked loss makes them in its forward pass; no hook for saved tensors sees them.
EARLY_GRADIENTS = "activations.head"
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

    `reserved_bytes`: what torch.cuda.max_memory_reserved will say; only a trace's replay knows it.
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


def cublas_workspace_bytes(gpu: Gpu) -> int:
    """aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute capability 9.x and later, else 8.125 MiB."""
    return 32 * MIB if gpu.capability[0] >= 9 else 4096 * 1024 * 2 + 16 * 1024 * 8


def flash_backward_bytes(shape: ModelShape, batch: int, block: int) -> int:
    """fp32 sums inside FlashAttention-2's backward: softmax_d and dq_accum, padded (Dao-AILab flash_api.cpp)."""
    rows = -(-block // 128) * 128
    multiple = 32 if shape.head_dim <= 128 else 64
    columns = -(-shape.head_dim // multiple) * multiple
    return batch * shape.n_head * rows * 4 * (1 + columns)


def symbols_of(config: RunConfig, gpu: Gpu, batch: int, block: int) -> dict[str, int]:
    """The letters of the formulas; A is the width of all heads, each padded to a multiple of 8.

    kept: scores of lm/attention.py that wait for backward; group, halfgroup: those of a group of heads, by width.
    moments: those in 8 bits (lm/adamw8bit_sizes.py); chunk: what is fp32 of them at one time. M: parameters in
    matrices of the blocks, which are Muon's; R: the rest; newton: what its iterations take.
    """
    shape = ModelShape.of(config)
    flash = gpu.capability >= (8, 0)
    heads = batch * shape.n_head
    return {
        "B": batch, "T": block, "C": shape.n_embd, "H": shape.n_head, "L": shape.n_layer, "V": shape.vocab_size,
        "W": shape.block_size, "P": shape.n_params, "n": min(config.loss_chunk_size, batch * block),
        "A": shape.n_head * -(-shape.head_dim // 8) * 8, "D": shape.head_dim,
        "cuBLAS": cublas_workspace_bytes(gpu) if gpu.kind == "cuda" else 0,
        "flash": flash_backward_bytes(shape, batch, block) if flash else 0,
        "kept": attention_sizes.kept_elements(heads, block, shape.head_dim),
        "group": attention_sizes.score_elements(heads, block, 4),
        "halfgroup": attention_sizes.score_elements(heads, block, 2),
        "moments": moments_bytes(shape.numels, CUDA_GRANULE if gpu.kind != "cpu" else 1),
        "chunk": TEMPORARY_BYTES, "M": (matrices := shape.n_block_matrix_params), "R": shape.n_params - matrices,
        "newton": shape.newton_schulz_bytes,
    }  # fmt: skip


def weight_widths(config: RunConfig, half: bool) -> tuple[int, ...]:
    """Bytes of a parameter in each copy of the model on the device: what runs, and fp32 masters beside it."""
    if not (config.master_weights and half):
        return (4,)
    return (2,) if config.optimizer_offload else (2, 4)


STEPS: dict[tuple[str, bool], type[EagerStep] | type[CompiledStep]] = {
    ("nanogpt", False): EagerStep, ("nanogpt", True): CompiledStep,
    ("modern", False): ModernEagerStep, ("modern", True): ModernCompiledStep,
}  # fmt: skip


def moment_sizes(optimizer: str) -> tuple[tuple[int, str], ...]:
    """(bytes, symbol) of the optimizer's states, each with its parameters: two fp32 moments, or Muon's one."""
    kinds = {"adamw8bit": ((1, "moments"),), "muon": ((8, "R"), (4, "M"))}
    return kinds.get(optimizer, ((8, "P"),))


MakeTimeline = Callable[[dict[str, int], int], Timeline]


class _Run:
    """One simulated run: the phases in their real order, with what stays alive between them."""

    def __init__(
        self, config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, compiled: bool, make: MakeTimeline = Timeline
    ) -> None:
        self.keeps = step == "nanogpt"
        self.config = config = config.as_nanogpt() if self.keeps else config
        self.symbols = symbols_of(config, gpu, config.batch_size, config.block_size)
        shape = ModelShape.of(config)
        in_muon = shape.block_matrices.total() if config.optimizer == "muon" else 0
        # Each of AdamW's parameters has a tensor of its own that counts steps; in 8 bits these are on the host.
        self.n_counts = 0 if config.optimizer == "adamw8bit" else shape.numels.total() - in_muon
        self.eval_symbols = symbols_of(config, gpu, config.eval_batch, config.eval_block)
        cuda = gpu.kind != "cpu"
        self.t = make(dict(self.symbols), CUDA_GRANULE if cuda else 1)
        # nanoGPT's context is null on a CPU, whatever --dtype says (train.py).
        half = dtype != "float32" and not (self.keeps and not cuda)
        self.half = half
        width = shape.head_dim
        self.products = config.attention == "bmm" and config.recipe == "nanogpt" and not self.keeps
        variant = Variant(
            half=half, cuda=cuda, keeps_logits=self.keeps, checkpointed=config.checkpointed,
            dropout=config.dropout > 0, bias=config.bias, chunked=config.loss_chunk_size > 0,
            attention=attention_kind(gpu, dtype, width, config.dropout, self.products),
            evaluation_attention=attention_kind(gpu, dtype, width, 0.0, self.products),
            master=config.master_weights, cheap=config.recompute_norm_gelu,
        )  # fmt: skip
        self.writes_scores = "math" in (variant.attention, variant.evaluation_attention)
        self.step = STEPS[config.recipe, compiled](self.t, variant, config.n_layer)
        self.logits: Tensor | None = None
        self.batch: list[Tensor] = []
        self.saved_bytes = 0

    def new_batch(self) -> list[Tensor]:
        """Token ids and targets, int64."""
        return [self.t.alloc("batch", self.t.size(8, "B", "T")) for _ in range(2)]

    def evaluate(self, phase: str) -> None:
        """Two iterations (one of each split at least), as the second still holds the first one's logits where kept."""
        self.t.use(self.eval_symbols)
        self.t.phase(phase)
        last: Tensor | None = None
        for _ in range(2):
            batch = self.new_batch()
            graph = self.step.forward(False)
            self.t.free(last, *batch)
            last = graph.logits
        self.t.free(last)
        self.t.use(self.symbols)

    def train(self, phase: str) -> None:
        """One optimizer step; from the second micro-batch on the peak repeats."""
        self.t.phase(phase)
        step: EagerStep | CompiledStep = self.step
        for _ in range(min(2, self.config.gradient_accumulation_steps)):
            fresh = [] if self.keeps else self.new_batch()
            graph: Graph | CompiledGraph = step.forward(True)
            self.saved_bytes = sum(
                tensor.size.nbytes * count
                for tensor, count in self.t.alive.items()
                if tensor.component.startswith(SAVED_COMPONENTS) and tensor.component != EARLY_GRADIENTS
            )
            self.t.free(self.logits)
            self.logits = graph.logits if self.keeps else None
            following = self.new_batch() if self.keeps else []  # nanoGPT fetches the next batch before backward
            if self.keeps and isinstance(graph, Graph):
                graph.loss.append(self.batch.pop())  # of the old one, only the loss still holds the targets
            step.backward(graph)  # type: ignore[arg-type]
            self.t.free(*self.batch, *fresh)
            self.batch = following
        self.t.at("optimizer")
        if not self.config.optimizer_offload:
            self.optimize(first=phase == "first_step")
        self.t.free_component("gradients")
        step.has_grads = False

    def optimize(self, *, first: bool) -> None:
        """The optimizer's states, which appear in its first step, and what each step takes for a moment."""
        if first:
            self.moments()
        passing = {"adamw8bit": "chunk", "muon": "newton"}.get(self.config.optimizer)
        if passing:
            self.t.free(self.t.alloc("temporaries", self.t.size(1, passing)))

    def moments(self) -> None:
        for width, symbol in moment_sizes(self.config.optimizer):
            self.t.alloc("optimizer", self.t.size(width, symbol))
        for _ in range(self.n_counts):
            self.t.alloc("optimizer", self.t.size(4))

    def peaks(self) -> dict[str, Peak]:
        self.t.at("build")
        self.t.phase("build")
        for width in weight_widths(self.config, self.half):
            self.t.alloc("weights", self.t.size(width, "P"))
        if self.config.recipe == "modern":  # cosines and sines of the rotary positions
            for _ in range(2):
                self.t.alloc("buffers", self.t.size(4, "W", "D"))
        if self.keeps:
            self.batch = self.new_batch()
        self.evaluate("evaluate_first")
        self.train("first_step")
        self.train("steady_step")
        self.evaluate("evaluate_later")
        return self.t.peaks


def simulated(
    config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, *, compiled: bool, make: MakeTimeline
) -> dict[str, Peak]:
    """The ledger's run, written into a timeline that is made of symbols and granule; the peaks of its phases."""
    return _Run(config, gpu, dtype, step, compiled, make).peaks()


def _staged_bytes(run: _Run) -> int:
    """Weights and moments, as a checkpoint copies them to the host's memory (run/saver.py): where they are already on a
    CPU, beside the steps that follow a save. A run without room for that copy saves without one.
    """
    sizes = ((4, "P"), *moment_sizes(run.config.optimizer))
    return sum(run.t.size(width, symbol).nbytes for width, symbol in sizes)


def _resume_peak(run: _Run) -> Peak:
    """nanoGPT loads its checkpoint onto the device beside the fresh model; foretrain copies tensor by tensor."""
    t = Timeline(run.symbols, run.t.granule)
    t.phase("resume")
    t.at("resume")
    for width in weight_widths(run.config, run.half):
        t.alloc("weights", t.size(width, "P"))
    if not run.config.optimizer_offload:
        for width, symbol in moment_sizes(run.config.optimizer):
            t.alloc("optimizer", t.size(width, symbol))
    if run.keeps:
        t.alloc("checkpoint", t.size(4, "P"))
    return t.peaks["resume"]


def _formula(tensor: Tensor, count: int) -> str:
    coefficient, *factors = tensor.size.formula.split("·")
    text = tensor.size.formula if coefficient != "1" else "·".join(factors)
    return text if count == 1 else f"{count} × {text}"


def components(peak: Peak, n_params: int) -> tuple[Component, ...]:
    """The rows of a peak, largest first; the formula lists every kind of tensor that is alive."""
    rows: dict[str, list[tuple[Tensor, int]]] = {}
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


def _needed(allocated: int, context: Context, cpu: bool, roughly: bool) -> tuple[int, int, int]:
    if cpu:
        base = (CPU_BASE_LOW_BYTES, CPU_BASE_EXPECTED_BYTES, CPU_BASE_HIGH_BYTES)
        slack = (1.0, CPU_SLACK_EXPECTED, CPU_SLACK_HIGH)
    else:
        base = (context.low_bytes, context.expected_bytes, context.high_bytes)
        slack = (RESERVED_LOW, RESERVED_EXPECTED, RESERVED_HIGH)
    if roughly:
        slack = tuple(s * r for s, r in zip(slack, ROUGHLY, strict=True))
    low, expected, high = (round(allocated * s) + b for s, b in zip(slack, base, strict=True))
    return low, expected, high


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
    run, context = _Run(config, gpu, dtype, step, compiled), Context.of(gpu)
    peaks = {**run.peaks(), "resume": _resume_peak(run)}
    saves_beside_steps = gpu.kind == "cpu" and step == "foretrain" and config.max_iters > config.eval_interval
    names = [name for name in PHASES if not (config.eval_only and name != "evaluate_first")]
    phases = []
    for name in names:
        peak = peaks[name]
        low, expected, high = _needed(peak.nbytes, context, gpu.kind == "cpu", compiled and run.writes_scores)
        if name == "steady_step" and saves_beside_steps:
            high += (copy := _staged_bytes(run))
            if available_bytes is None or expected + round(STAGING_SPARE * copy) <= available_bytes:
                expected += copy
        phase = PhaseMemory(
            phase=name, moment=peak.moment, allocated_bytes=peak.nbytes, needed_low_bytes=low,
            needed_expected_bytes=expected, needed_high_bytes=high, components=components(peak, run.symbols["P"]),
        )  # fmt: skip
        phases.append(phase.model_copy(update={"verdict": judge(phase, available_bytes)}))
    return StepMemory(step=step, compiled=compiled, phases=tuple(phases), saved_bytes=run.saved_bytes, context=context)


def worst_verdict(memory: StepMemory) -> Verdict | None:
    """The verdict of the whole run: that of its worst phase."""
    order: list[Verdict | None] = ["does_not_fit", "tight", "fits", None]
    return min((phase.verdict for phase in memory.phases), key=order.index)
