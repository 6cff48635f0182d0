"""A run as the estimate sees it: three steps of at most three micro-batches in their real order, as in
predict/trace/drive.py, since what the allocator reserves settles there; on a CPU fewer. No torch."""

from typing import Any

from foretrain.config import shape as attention_sizes
from foretrain.config.families import family_of
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques import optimizer_of
from foretrain.predict.abstract.fully_shard import passes_of
from foretrain.predict.abstract.ranks import OneCard, SendingGradients, UpdatingInBackward
from foretrain.predict.abstract.step import EagerProgram
from foretrain.predict.abstract.tensors import bfloat16, float16
from foretrain.predict.allocator.blocks import GRAPH_POOL
from foretrain.predict.compiled.region import BlocksProgram
from foretrain.predict.compiled.step import CompiledProgram
from foretrain.predict.estimate.kernel_buffers import (
    Processors,
    column_sum_bytes,
    flash_backward_bytes,
    flash_split_bytes,
)
from foretrain.predict.estimate.ranks import Rank
from foretrain.predict.spec import DISTINCT_MICRO_BATCHES, StepSpec, letters_of
from foretrain.predict.timeline import Peak, Tensor, Timeline

CUDA_GRANULE = 512  # c10/core/AllocatorConfig.h, kMinBlockSize
SAVED_COMPONENTS = ("activations", "logits", "weight_copies", "batch")
# A chunked loss makes them in its forward pass; no hook for saved tensors sees them.
EARLY_GRADIENTS = "activations.head"
# A step that becomes one CUDA graph runs on a stream of its own, then is recorded into a pool (model/graphed.py).
ASIDE, IN_GRAPH = 1, GRAPH_POOL + 1
LOWS = {"float16": float16, "bfloat16": bfloat16}


def granule_of(gpu: Gpu) -> int:
    return CUDA_GRANULE if gpu.kind != "cpu" else 1


def symbols_of(spec: StepSpec, batch: int, block: int) -> dict[str, int]:
    """The letters of the formulas: those of `letters_of`, and what kernels take on this device.

    kept: scores of model/attention.py saved for backward; group, halfgroup: those of a group of heads, by width; m:
    tokens in one of Inductor's chunks of the loss; L2: the cache; flash, split: inside flash attention, backward and
    forward; sums1 to sums4: inside the sum that is the gradient of a bias of so many C. Optimizers add their own."""
    gpu, shape = spec.gpu, ModelShape.of(spec.config)
    letters = letters_of(spec.config, batch, block)
    flash = gpu.capability >= (8, 0)
    heads = batch * shape.n_head
    in_flash = flash_backward_bytes(batch, shape.n_head, block, shape.head_dim)
    if shape.n_kv_head != shape.n_head:  # gradients of keys and values for each head of queries, which are then summed
        in_flash += [2 * heads * block * letters["E"]] * 2
    processors = Processors.of(gpu.capability, gpu.sm_count or 1)
    return {
        **letters, "m": -(-(batch * block) // 8),
        "cuBLAS": spec.torch.cublas_workspace_bytes(gpu.capability) if gpu.kind == "cuda" else 0,
        "L2": gpu.cache_bytes if gpu.kind == "cuda" else 0,
        "flash": sum(in_flash) if flash else 0,
        "split": sum(flash_split_bytes(batch, shape.n_head, block, block, shape.head_dim, processors.number)),
        **{f"sums{n}": sum(column_sum_bytes(processors, batch * block, n * shape.n_embd)) for n in (1, 2, 3, 4)},
        "kept": attention_sizes.kept_elements(heads, block, shape.head_dim),
        "group": attention_sizes.score_elements(heads, block, 4),
        "halfgroup": attention_sizes.score_elements(heads, block, 2),
        **optimizer_of(spec.config).letters(shape, granule_of(gpu)),
    }  # fmt: skip


def weight_widths(spec: StepSpec) -> tuple[int, ...]:
    """Return bytes of a parameter in each copy: what runs, an updated fp32 twin (on a CPU a host's, too)."""
    narrow = spec.config.master_weights and spec.half
    runs = 2 if narrow else 4
    return (runs, 4) if (narrow or spec.config.optimizer_offload) and not spec.offloads else (runs,)


def program_of(spec: StepSpec, t: Timeline) -> EagerProgram:
    """What writes the passes of a step into `t`: eager, compiled as one, or, where ranks share it, block by block."""
    blocks = spec.sharing is not None or spec.config.compiles_blocks  # as model/step.py compiles it
    compiled = BlocksProgram if blocks else CompiledProgram
    program = compiled if spec.compiled else EagerProgram
    if spec.offloads and spec.config.gradient_offload:
        ranks: OneCard = SendingGradients()
    elif spec.updates_in_backward:
        ranks = UpdatingInBackward()
    else:
        ranks = passes_of(spec.sharing, [p.shape for p in ModelShape.of(spec.config).parameters()], half=spec.half)
    return program(t, spec.variant, spec.config, LOWS.get(spec.dtype), ranks=ranks)


class SimulatedRun:
    """One run of a step, by its timeline `t`. `keeps`: NCCL still has the first buckets (trace/ranks.py, Reducer)."""

    def __init__(self, spec: StepSpec, make: type[Timeline] = Timeline, *, keeps: bool = True) -> None:
        self.spec, self.config, self.keeps = spec, spec.config, keeps
        config = spec.config
        self.rank = Rank(spec.sharing, ModelShape.of(config))
        self.symbols = symbols_of(spec, config.batch_size, config.block_size) | self.rank.letters
        self.eval_symbols = symbols_of(spec, config.eval_batch, config.eval_block) | self.rank.letters
        self.optimizer = optimizer_of(config)
        self.in_muon, self.beside_muon = [], []  # elements of each parameter that the optimizer steps
        for p, numel in self.rank.stepped:
            (self.in_muon if self.optimizer.takes(p.name, p.shape) else self.beside_muon).append(numel)
        if len(self.rank.stepped) < len(self.rank.parameters):
            self._own_moments(granule_of(spec.gpu))
        # Each of AdamW's parameters has a tensor of its own that counts steps; in 8 bits these are on the host.
        self.n_counts = len(self.beside_muon) if self.optimizer.counts_on_device else 0
        self.t = make(dict(self.symbols), granule_of(spec.gpu))
        # As predict/trace/drive.py has them.
        self.micro_steps, self.steady_steps = (DISTINCT_MICRO_BATCHES, 2) if spec.cuda else (2, 1)
        variant = spec.variant
        self.writes_scores = "math" in (variant.attention, variant.evaluation_attention)
        self.step = program_of(spec, self.t)
        self.logits: Any = None
        self.batch: list[Tensor] = []
        self.saved_bytes = 0
        self.graphed = spec.is_one_graph

    def _own_moments(self, granule: int) -> None:
        """Letters that stand for moments of all parameters come to those of this rank's."""
        for _, symbol in self.optimizer.moments:
            if self.rank.letter(symbol) == symbol:
                own = sum(-(-size // granule) * granule for size in self.moments_of(symbol))
                self.symbols[symbol] = self.eval_symbols[symbol] = own

    def new_batch(self) -> list[Tensor]:
        """Token ids and targets, int64; none where a graph has them."""
        count = 0 if self.t.stream == IN_GRAPH else 2
        return [self.t.alloc("batch", self.t.size(8, "B", "T")) for _ in range(count)]

    def evaluate(self, phase: str) -> None:
        """Two iterations (one of each split at least), as the second still holds the first one's logits where kept."""
        self.t.use(self.eval_symbols)
        self.t.phase(phase)
        last: Any = None
        for _ in range(2):
            batch = self.new_batch()
            graph = self.step.forward(False)
            self.t.free(last)
            self.t.free(*batch)
            last = graph.logits
            del graph
        self.t.free(last)
        self.t.use(self.symbols)

    def train(self, phase: str) -> None:
        """One optimizer step; from the second micro-batch on the peak repeats, from the third what is reserved."""
        self.t.phase(phase)
        before = self.t.now()
        count = min(self.micro_steps, self.config.gradient_accumulation_steps)
        for number in range(count):
            self.step.last = self.spec.sharing is not None and number == count - 1
            if number == 2 and not self.step.last and self._again(before):  # as the second, the first to find gradients
                continue
            before = self.t.now()
            self._micro_batch()
        self.t.at("optimizer")
        if not self.spec.offloads:
            self.optimize(first=phase == "first_step")
        self.step.zero_grad()

    def _micro_batch(self) -> None:
        step: Any = self.step
        fresh = [] if self.spec.keeps_logits else self.new_batch()
        self.t.free(*self.batch[1:])  # the pass has the targets: only its graph holds them once the next ones are there
        graph: Any = step.forward(True)
        self.saved_bytes = sum(
            kind.size.nbytes * kind.count
            for kind in self.t.living()
            if kind.component.startswith(SAVED_COMPONENTS) and kind.component != EARLY_GRADIENTS
        )
        self.t.free(self.logits)
        self.logits = graph.logits if self.spec.keeps_logits else None
        following = self.new_batch() if self.spec.keeps_logits else []  # nanoGPT fetches the next batch before backward
        step.backward(graph)
        self.t.free(*self.batch[:1], *fresh)
        self.batch = following

    def _again(self, since: tuple[int, int]) -> bool:
        """All since then once more, event for event, at a tenth of the cost; False where it cannot be the same."""
        successors = self.t.repeat(since)
        if successors is None:
            return False
        if isinstance(self.logits, Tensor):
            self.logits = successors.get(self.logits.serial, self.logits)
        self.batch = [successors.get(tensor.serial, tensor) for tensor in self.batch]
        return True

    def optimize(self, *, first: bool) -> None:
        if first and not self.spec.updates_in_backward and not self.graphed:  # else they are there
            self.moments()
        if self.optimizer.passing:
            self.t.free(self.t.alloc("temporaries", self.t.size(1, self.optimizer.passing)))

    def moments(self) -> None:
        for width, symbol in self.optimizer.moments:
            size = self.t.size(width, self.rank.letter(symbol))
            self.t.alloc_all("optimizer", size, self.moments_of(symbol))
        for _ in range(self.n_counts):
            self.t.alloc("optimizer", self.t.size(4))

    def moments_of(self, symbol: str) -> list[int]:
        """Bytes of each tensor that `moments` sum up under a symbol."""
        if symbol == "M":
            return [4 * numel for numel in self.in_muon]
        return [size for numel in self.beside_muon for size in self.optimizer.tensors(numel)]

    def peaks(self) -> dict[str, Peak]:
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Up to the end of the first evaluation, which is a fifth of the work."""
        self.t.at("build")
        self.t.phase("build")
        self.rank.built(self.t, weight_widths(self.spec))
        for _ in family_of(self.config).buffers(self.config):  # cosines and sines of the rotary positions
            self.t.alloc("buffers", self.t.size(4, "W", "D"))
        self.rank.wrapped(self.t)
        if self.spec.keeps_logits:
            self.batch = self.new_batch()
        if self.graphed:
            self.moments()
            self.t.stream = ASIDE
        self.evaluate("evaluate_first")

    def finish(self) -> dict[str, Peak]:
        self.train("first_step")
        self.t.phase("steady_step")
        self.step.left += self.rank.rebuilt(keeps=self.keeps)
        before = self.t.now()
        self.train("steady_step")
        for _ in range(1, self.steady_steps):
            if not self._again(before):
                self.train("steady_step")
        if self.graphed:
            self.record()
        self.evaluate("evaluate_steady")
        return self.t.peaks

    def record(self) -> None:
        """The step once more, into a graph whose memory stays; evaluations use it after that."""
        self.t.stream = 0
        for _ in range(self.config.gradient_accumulation_steps):
            self.new_batch()
        self.step.clear_workspaces()
        self.t.empty_cache()
        self.t.stream = ASIDE
        self.step.workspaces = [self.t.alloc("workspace", self.t.size(1, "cuBLAS"))]
        self._seeds()
        self.t.stream = IN_GRAPH
        self.train("steady_step")
        self.t.stream = 0
        self.t.use(self.eval_symbols)
        self.new_batch()
        self.t.use(self.symbols)
        self.t.empty_cache()
        self._seeds()
        self.t.stream = IN_GRAPH

    def _seeds(self) -> None:
        """The generator's seed and offset, which a graph reads (predict/trace/card/torch_cuda.py)."""
        self.t.stream = 0
        for _ in range(2):
            self.t.alloc("workspace", self.t.size(8))


def staged_bytes(run: SimulatedRun) -> int:
    """Return weights and moments that a save copies to the host (training/saver.py), where there is room for them."""
    sizes = ((4, "P"), *run.optimizer.moments)
    return sum(run.t.size(width, symbol).nbytes for width, symbol in sizes)


def resume(run: SimulatedRun) -> Timeline:
    """nanoGPT loads its checkpoint onto the device beside the fresh model; foretrain copies tensor by tensor."""
    t = Timeline(run.symbols, run.t.granule)
    t.phase("resume")
    t.at("resume")
    for width in weight_widths(run.spec):
        t.alloc_all("weights", t.size(width, run.rank.weight), [width * numel for numel in run.rank.pieces])
    if not run.spec.offloads:
        for width, symbol in run.optimizer.moments:
            t.alloc_all("optimizer", t.size(width, run.rank.letter(symbol)), run.moments_of(symbol))
    if run.spec.keeps_logits:
        t.alloc_all("checkpoint", t.size(4, "P"), [4 * numel for numel in run.rank.pieces])
    return t
