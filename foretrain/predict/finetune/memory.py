"""The memory of a fine-tuning run: each phase with its components and a verdict. No torch."""

import math
from functools import cached_property, lru_cache
from typing import Any

from foretrain.base.process_memory import collected_later
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import UNNAMED, ModelFacts
from foretrain.config.hub.parameters import parameters_of
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import Context
from foretrain.predict import software
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.ranks import Remains
from foretrain.predict.allocator.replay import PhasePeak, replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.estimate.kernel_buffers import (
    Processors,
    column_sum_bytes,
    flash_backward_bytes,
    flash_split_bytes,
)
from foretrain.predict.estimate.ranks import Buckets
from foretrain.predict.estimate.simulated_run import granule_of
from foretrain.predict.finetune.generation import Completions
from foretrain.predict.finetune.optimizers import OPTIMIZERS
from foretrain.predict.finetune.outside import Collected, Outside, formula_of, numbers
from foretrain.predict.finetune.program import CompiledProgram, program_of
from foretrain.predict.finetune.ranks import context_of
from foretrain.predict.inference.stored import is_named
from foretrain.predict.memory import (
    EXACTLY,
    Component,
    Fit,
    PhaseMemory,
    Room,
    Roughly,
    RunMemory,
    carried,
    components,
    needed,
    on_cpu,
)
from foretrain.predict.timeline import Passage, Peak, Tensor, Timeline

MOST_KEPT = 128
# Which freed blocks are found again changes with torch, kernels and system, which a plan does not know. 11 runs on an
# RTX 4080 (Windows, torch 2.6; DaoyuanLi2816/can-i-finetune-this@053ce9e, benchmarks/results) reserved 9% less to 12%
# more than the replay; with the versions of the plan 91 runs on an H100 were within 1% (gpu_h100_finetune.json).
OTHER_SOFTWARE: Roughly = (0.92, 1.0, 1.1)  # times RESERVED


class FineTuneEstimate:
    """The memory of one way to fine-tune a model, without verdicts; `judged` gives them for a card's free memory."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        self.context, self.cuda = context_of(tune, gpu), gpu.kind == "cuda"
        with collected_later():
            run = SimulatedFineTuning(facts, tune, gpu)
            timeline = run.write()
        more = run.zero.more_bytes if run.zero else 0
        self.kept_bytes = kept, most = _kept_bytes(facts, tune, timeline.peaks["load"])
        span = {"expected_bytes": self.context.expected_bytes + more // 2 + kept}
        span["high_bytes"] = self.context.high_bytes + more + most
        self.beside = self.context.model_copy(update=span)  # the allocator's tensors that are sure
        self.peaks = {name: timeline.peaks[name] for name in PHASES if name in timeline.peaks}
        self.fit = Fit(timeline.packed(), Room(Settings(), self.beside), list(self.peaks))
        self.symbols, self._saved_bytes, self._paged_bytes = dict(run.symbols), run.saved_bytes, run.paged_bytes
        self.weights, self.packed = run.program.weights, run.program.packed
        self.n_trained = sum(parameter.numel() for parameter in run.trained)
        self.gradient_dtypes = tuple(sorted({parameter.dtype.name for parameter in run.trained}))
        self.n_params = sum(parameter.numel() for parameter in run.program.weights.values())
        self.n_params += sum(n_out * n_in for n_out, n_in in run.program.packed.values()) + run.program.n_original

    @cached_property
    def memory(self) -> RunMemory:
        """The phases. Their tensors are replayed through the allocator when somebody asks for it."""
        held = {peak.phase: peak for peak in replay(self.fit.events, self.fit.room.settings).phases}
        phases = tuple(self._phase(name, peak, held[name]) for name, peak in self.peaks.items())
        return RunMemory(
            phases=phases, saved_bytes=self._saved_bytes, context=self.context, paged_bytes=self._paged_bytes
        )

    def _phase(self, name: str, peak: Peak, held: PhasePeak) -> PhaseMemory:
        rows = components(peak, self.n_trained, most_terms=None)
        allocated = max(peak.nbytes, held.allocated_bytes) if self.cuda else peak.nbytes
        reserved = held.reserved_bytes if self.cuda else None
        if rest := allocated - peak.nbytes:
            rows = (*rows, Component(id="rounding", size_bytes=rest, formula=""))
        low, expected, high = needed(allocated, reserved, self.beside, OTHER_SOFTWARE if self.cuda else EXACTLY)
        least = allocated + self.context.low_bytes if self.cuda else low
        return PhaseMemory(
            phase=name, moment=peak.moment, allocated_bytes=allocated, needed_low_bytes=max(low, least),
            needed_expected_bytes=expected, needed_high_bytes=high, components=rows,
            reserved_bytes=reserved,
        )  # fmt: skip

    def judged(self, available_bytes: int | None, card_bytes: int | None = None) -> RunMemory:
        """Return it with verdicts for what the process may take, context included; without where nobody knows that."""
        if available_bytes is None:
            return self.memory
        if self.cuda:
            found = carried(self.fit.judged(self.memory.phases, self.memory.phases, available_bytes, card_bytes))
            phases = tuple(_given_back(phase, available_bytes) for phase in found)
        else:
            phases = tuple(on_cpu(phase, available_bytes) for phase in self.memory.phases)
        return self.memory.model_copy(update={"phases": phases})


# Weights of unsloth's copies that keep layers in 16 bits, over those of plain ones (unsloth.ai/blog/dynamic-4bit): less
# than 10% more in general; the most is that of Qwen2-VL-2B, 1.81 over 1.36 GB.
KEPT, MOST_KEPT_IN_16 = 0.1, 0.34
HALF_MORE = 2 - 0.5 - 1 / 64  # bytes that a number in 16 bits has over one in 4 with its scale


def _kept_bytes(facts: ModelFacts, tune: FineTune, loaded: Peak) -> tuple[int, int]:
    """What layers that stay in 16 bits take over those in 4: expected, and at most."""
    if tune.method != "qlora" or not facts.kept:
        return 0, 0
    if facts.kept == UNNAMED:
        weights = sum(row.size_bytes for row in components(loaded, 0) if row.id == "weights")
        return round(KEPT * weights), round(MOST_KEPT_IN_16 * weights)
    linear = [each for each in parameters_of(facts) if each.role == "linear" and not each.name.endswith("bias")]
    kept = sum(each.elements for each in linear if any(is_named(each.module, name) for name in facts.kept))
    return round(HALF_MORE * kept), round(HALF_MORE * kept)


def _given_back(phase: PhaseMemory, available_bytes: int) -> PhaseMemory:
    """What fits shows no more than there is: the allocator frees what it only keeps before it asks for more."""
    if phase.verdict != "fits":
        return phase
    return phase.model_copy(update={"needed_high_bytes": min(phase.needed_high_bytes, available_bytes)})


@lru_cache(maxsize=MOST_KEPT)
def _estimate(facts: str, tune: str, gpu: str, *_: str) -> FineTuneEstimate:
    return FineTuneEstimate(
        ModelFacts.model_validate_json(facts), FineTune.model_validate_json(tune), Gpu.model_validate_json(gpu)
    )


def estimated(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> FineTuneEstimate:
    """The estimate of a run on this card. The last ones are kept."""
    asked = (each.model_dump_json() for each in (facts, tune, gpu))
    return _estimate(*asked, str(Context.of(gpu)), str(software.of("")))


# A run's phases, with what stays alive between them, in the order of transformers' trainer.py. Sizes round up as
# PyTorch's CUDA allocator rounds them; a CPU's do not.

PHASES = ("load", "prepare", "generate", "score", "first_step", "steady_step", "evaluate", "save", "merge")
PAGED = 100_000  # elements from which on bitsandbytes pages a state (get_state_buffer)
MICRO_BATCHES = 3  # that are written out, and three steps: then what the allocator reserves has settled


def symbols_of(facts: ModelFacts, tune: FineTune, gpu: Gpu, batch: int) -> dict[str, int]:
    """The letters of the formulas: sizes of the model and of a batch, and what kernels take on this card."""
    H, D, cuda = facts.n_head, facts.head_dim, gpu.kind == "cuda"
    padded = -(-D // 8) * 8
    batch, T = tune.rows(batch)
    processors = Processors.of(gpu.capability, gpu.sm_count or 1)
    in_flash = flash_backward_bytes(batch, H, T, D)
    if facts.groups > 1:  # gradients of keys and values for each head of queries, which are then summed
        in_flash += [2 * batch * H * T * D] * 2
    sums = {f"sums{n}": sum(column_sum_bytes(processors, batch * T, n * facts.n_embd)) for n in (1, 2, 3, 4)}
    return {
        "B": batch, "T": T, "C": facts.n_embd, "H": H, "K": facts.n_kv_head, "D": D, "E": padded,
        "A": H * padded, "G": facts.groups, "F": facts.mlp_width, "V": facts.vocab_size, "r": tune.lora_r, "n": -1,
        "kept": 0, "X": facts.n_expert, "M": facts.expert_width,
        "flash": sum(in_flash) if gpu.capability >= (8, 0) else 0,
        "split": sum(flash_split_bytes(batch, H, T, T, D, processors.number)), **sums,
        **({"L": tune.completion_tokens} if tune.generates else {}),
        "cuBLAS": software.of("").cublas_workspace_bytes(gpu.capability) if cuda else 0,
        "L2": gpu.cache_bytes if cuda else 0,
    }  # fmt: skip


class SimulatedFineTuning(Remains):
    """One run. `t` is its timeline once `write` was called; `paged_bytes`: states in managed memory."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        self.facts, self.tune, self.gpu = facts, tune, gpu
        self.cuda = gpu.kind == "cuda"
        self.program = program_of(facts, tune, gpu)
        self.symbols = self.program.sizes(symbols_of(facts, tune, gpu, tune.batch_size))
        super().__init__(Timeline(dict(self.symbols), granule_of(gpu)), self.program.ranks)
        self.outside = Outside(self.program, self.t)
        self.alloc = self.outside.alloc
        self.trained = list(self.program.trained().values())
        self.zero, whole = self.program.zero, tune.world > 1 and not tune.sharded
        # of each trained parameter what the optimizer has here, and bytes of an element
        self.pieces = [
            (p, (-(-p.numel() // tune.world),), 4) if self.zero else (p, *self._piece(p)) for p in self.trained
        ]
        sizes = [p.numel() * p.dtype.itemsize for p in self.trained] if whole and not self.zero else []
        self.buckets = Buckets(self.t, sizes, looks_for_unused=tune.looks_for_unused)
        self.passages: dict[Any, Passage] = {}
        self.outputs: list[Tensor] = []  # of the last micro-batch, which a loop of one's own holds until the next ones
        self.started: set[bool] = set()
        self.held: list[Tensor] = []  # the batch that was taken last
        self.prepares = tune.adapters or tune.references  # else the batches of the first step come with it
        self.paged_bytes = self.saved_bytes = 0
        self.completions = Completions(self)

    # -- phases --------------------------------------------------------------------------------------------

    def write(self) -> Timeline:
        if self.tune.sharded:
            self.shard()
        else:
            self.outside.load()
            self.outside.prepare()
            self.precompute()
            self.completions.start_vllm()
        if self.buckets.sizes:
            self.wrap()
        if self.zero:  # the fp32 copy, and what stage 3 has for good
            self.alloc("optimizer", 4 * self.zero.own)
            if self.zero.stage == 3:
                self.reduced()
        self.step("first_step")
        self.buckets.rebuild()
        self.step("steady_step")
        if self.tune.evaluate:
            self.evaluate()
        self.outside.save()
        self.t.free(*self.left)
        self.left = []
        if self.tune.sharded and not self.zero:  # each weight is gathered, and copied
            weights = [p for group in self.program.shards for p in group.parameters]
            largest = max(self.program.stored_bytes(p) * p.numel() for p in weights)
            self.t.free(*[self.alloc("temporaries", largest) for _ in range(2)])
        self.step("steady_step")
        self.t.free(*self.held)
        if self.tune.merges:
            self.outside.merge()
        return self.t

    def shard(self) -> None:
        """Bring the weights to the card a group at a time, and keep this rank's piece of each."""
        self.t.at("build")
        self.t.phase("load")
        tables: list[Tensor] = []  # whole, which accelerate has until all is cut
        held = () if self.zero else ("embed_tokens.weight", "lm_head.weight")
        groups = [group.parameters for group in self.program.shards]
        for parameters in [[p] for group in groups for p in group] if self.zero else groups:
            whole = [self.outside.weight(p, self.program.stored_bytes(p)) for p in parameters]
            for p in parameters:
                shape, width = self._piece(p)
                self.outside.weight(p, width, shape)
            for p, tensor in zip(parameters, whole, strict=True):
                if p.name in held:
                    tables.append(tensor)
                else:
                    self.t.free(tensor)
        self.t.free(*tables)
        self.outside.buffers()

    def _piece(self, parameter: Parameter) -> tuple[tuple[int, ...], int]:
        """The shape of a weight's piece that is here, and bytes of an element."""
        if not self.tune.sharded:
            return parameter.shape, parameter.dtype.itemsize
        rows, *rest = (parameter.numel(),) if self.zero else parameter.shape
        return (-(-int(rows) // self.tune.world), *rest), self.program.stored_bytes(parameter)

    def reduced(self) -> list[Tensor]:
        """Make what ZeRO has beside a backward pass, at least: this card's gradients, a bucket, gathered weights."""
        assert self.zero is not None
        own, live = self.zero.item_bytes * self.zero.own, self.zero.live_bytes
        sizes = {"gradients": own, "buckets": self.zero.bucket_bytes, "gathered": live}
        return [self.alloc(component, nbytes) for component, nbytes in sizes.items() if nbytes]

    def precompute(self) -> None:
        """The reference's passes over the data, where they come first."""
        tune = self.tune
        for size in (tune.batch_size, *([tune.eval_batch_size] if tune.evaluate else [])):
            if tune.precompute_reference and tune.references:
                self.t.use(self.symbols_for(size))
                batch, passage = self.batch(), self.passage(train=False, before="reference")
                self.keep(passage, *[self.t.play(passage, 0)] * 2)
                self.t.free(*batch)
        self.t.use(self.symbols)

    def wrap(self) -> None:
        if not self.prepares:
            self.t.phase("first_step")
        packed = (n_out * n_in for n_out, n_in in self.program.packed.values())
        weights = [p.numel() * p.dtype.itemsize for p in self.program.weights.values()]
        self.buckets.wrap([*weights, *(count // (1 if self.tune.load_in_8bit else 2) for count in packed)])

    def step(self, phase: str) -> None:
        """One optimizer step. The batches of all its micro-batches are there, and their labels counted, before it
        begins, in what ran before; the last one stays until the first of the next step is taken."""
        tune = self.tune
        if phase == "first_step" and not self.prepares:
            self.t.phase(phase)
        if tune.generates:
            self.completions.write(tune.generated, tune.batch_size)
        batches = [self.batch() for _ in range(min(MICRO_BATCHES, tune.grad_accum))]
        if not tune.preferences and not tune.scores:
            self.t.free(self.t.alloc("temporaries", self.t.size(9, "B", "T")))  # which of them count, and how many
        self.t.phase(phase)
        reduced = self.reduced() if self.zero and self.zero.stage < 3 else []
        for number, batch in enumerate(batches, 1):
            self.t.free(*self.held)
            self.micro_batch(last=number == len(batches))
            self.held = batch
        self.t.at("optimizer")
        self.t.free(*reduced[1:])  # the bucket
        reduced = reduced and [reduced[0], self.alloc("gradients", 4 * self.zero.own if self.zero else 0)]
        self.optimize(first=phase == "first_step")
        self.zero_grad()
        self.t.free(*reduced)

    def micro_batch(self, *, last: bool) -> None:
        if isinstance(self.program, CompiledProgram) and True not in self.started:
            self.gradients = self.program.first_pass(self.t, self._workspaces())
            self.started.add(True)
            return
        self.outside.places.before_a_pass()
        passage = self.passage(train=True, last=last)
        given = self.given(passage)
        shift = self.t.play(passage, 0, given=given)
        self.t.free(*self.outputs)
        self.outputs = []
        self.saved_bytes = sum(
            kind.size.nbytes * kind.count
            for kind in self.t.living()
            if kind.component.startswith(("activations", "logits", "weight_copies"))
        )
        self.keep(passage, shift, self.t.play(passage, 1, shift, given))
        self.hold(passage, shift)

    def hold(self, passage: Passage, shift: int) -> None:
        """Take what a forward pass gave a loop of one's own."""
        for serial in passage.left if self.tune.loop == "own" else ():
            component, size = passage.kinds[serial]
            if component not in ("gradients", "workspace"):
                self.outputs.append(self.t.adopt(component, size, serial + shift))

    def optimize(self, *, first: bool) -> None:
        """Clip, with a norm for each gradient, and update; the states appear in the first step."""
        memory = OPTIMIZERS[self.tune.optim]
        if self.tune.max_grad_norm:
            norms = [self.alloc("temporaries", 4) for _ in self.trained]
            self.t.free(*norms)
        for nbytes in memory.shared if first else ():
            self.alloc("optimizer", nbytes)
        for parameter, shape, width in self.pieces if first else ():
            states = memory.embedding if memory.embedding and "embed" in parameter.name else memory.states
            for nbytes in states(shape, width):
                if memory.paged and parameter.numel() >= PAGED:
                    self.paged_bytes += nbytes
                else:
                    each, rest = divmod(nbytes, math.prod(shape))
                    self.alloc("optimizer", nbytes, "" if rest else formula_of(each, shape))
        passes = memory.passing if self.cuda else memory.passing_on_cpu or memory.passing
        processors = Processors.of(self.gpu.capability, self.gpu.sm_count or 1) if self.cuda else None
        passing = passes([(shape, width) for _, shape, width in self.pieces], processors)
        self.t.free(*[self.alloc("temporaries", nbytes) for nbytes in passing if nbytes])

    def evaluate(self) -> None:
        """Batches of its own size, with the logits that are collected."""
        tune = self.tune
        self.t.phase("evaluate")
        self.t.use(self.symbols_for(tune.eval_batch_size))
        most = tune.eval_accumulation_steps or tune.eval_batches
        letters, each = ("B", tune.scores or 1) if tune.scores or tune.whole else ("BTV", 1)
        collected = Collected(self.t, each * self.program.logit_bytes, most, tune.world, letters)
        before: list[Tensor] = []  # the last batch, until the next one was used
        for number in numbers(tune.eval_batches):
            if tune.generates:
                self.completions.write(tune.eval_batch_size, tune.eval_batch_size, phases=False)
            batch = self.batch()
            passage = self.passage(train=False)
            shift = self.t.play(passage, 0)
            self.keep(passage, shift, shift)
            self.t.free(*self.outputs)
            self.outputs = []
            self.hold(passage, shift)
            if tune.keeps_logits:
                collected.add(number)
            self.t.free(*before)
            before = batch
        collected.release()
        self.t.free(*before)
        self.t.use(self.symbols)

    def batch(self) -> list[Tensor]:
        """Token ids, a mask and labels, of KTO twice; where all rows are one, positions, and each token's sample."""
        count = 2 if self.tune.scores or self.tune.generates else 6 if self.tune.drifts else 3
        found = [self.t.alloc("batch", self.t.size(8, "B", "T")) for _ in range(count)]
        return [*found, self.t.alloc("batch", self.t.size(4, "B", "T"))] if self.tune.joined else found

    # -- parts ---------------------------------------------------------------------------------------------

    def symbols_for(self, batch: int, tokens: int = 0) -> dict[str, int]:
        """The letters of a batch of other samples, or of other lengths."""
        tune = self.tune.model_copy(update={"seq_len": tokens}) if tokens else self.tune
        return symbols_of(self.facts, tune, self.gpu, batch)

    def passage(self, *, train: bool, last: bool = False, before: str = "") -> Passage:
        """A pass, without the workspaces that cuBLAS has from earlier ones; a later one adds to the gradients."""
        there, state = self._workspaces(), self.ranks.state(self.gradients, self.left, last=last, saving=train)
        first = train and self.outside.places.passes == 1
        key = train, state, first, before, self.t.symbols["B"], there
        self.started.add(train)
        if key not in self.passages:
            structure = self.program.structure(self.t.symbols, train=train, state=state, first=first, before=before)
            self.passages[key] = structure.sized(self.t).without("workspace", there)
        return self.passages[key]

    def _workspaces(self) -> int:
        """How many cuBLAS has: one for each thread that has multiplied."""
        return 2 if True in self.started else max(len(self.started), len(self.outside.workspaces))
