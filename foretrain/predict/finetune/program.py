"""Micro-batches of a Hugging Face decoder (model/hub/decoder.py), run on tensors without values. No torch."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import (
    LEAST_OFFLOADED_BYTES,
    LETTERS,
    ROLES,
    UNSLOTH_VERSION,
    ModelFacts,
    functions_of,
    table_rows,
)
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.abstract import autograd, modules, programs
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.dims import Dim, Kernel
from foretrain.predict.abstract.fusion import fused
from foretrain.predict.abstract.passage import MOST, OUTSIDE, Recorder, Structure, Uneven, copies_of, unroll
from foretrain.predict.abstract.ranks import FRESH, OneCard, SendingGradients, State
from foretrain.predict.abstract.tensors import DType, bfloat16, float16, float32
from foretrain.predict.compiled import operations
from foretrain.predict.compiled.graph import Compiler
from foretrain.predict.compiled.halves import recorded
from foretrain.predict.compiled.step import LOADER
from foretrain.predict.compiled.timing import first_walk
from foretrain.predict.estimate.kernel_buffers import efficient_backward_bytes
from foretrain.predict.estimate.sdpa import USUAL, WITH_CUDNN, Call, kernel, prefers_cudnn
from foretrain.predict.finetune.ranks import NORM_IN_HEAD, Shards, Zero, cards_of, sharing_of
from foretrain.predict.finetune.targets import adapted_roles, is_saved, is_untied, no_such_layers, own_words
from foretrain.predict.timeline import Tensor, Timeline

DTYPES: dict[str, DType] = {"float32": float32, "bfloat16": bfloat16, "float16": float16}
AMP: dict[str, DType | None] = {"auto": None, "no": None, "bf16": bfloat16, "fp16": float16}
HALF = ("torchtune",)  # loops whose adapters have the dtype of the model
# Loops that leave what is not quantized in the dtype of the model. LLaMA-Factory never calls peft's
# prepare_model_for_kbit_training (hiyouga/LLaMA-Factory@ff6d4d1, model/model_utils/checkpointing.py).
AS_LOADED = ("torchtune", "trl", "llama-factory")
# axolotl calls it, and then gives modules with these words in their names the dtype of the model again, whatever the
# adapter and the attention (axolotl-ai-cloud/axolotl@067b021, loaders/model.py, _configure_embedding_dtypes).
CONVERTED_BACK = ("norm", "embed_tokens", "lm_head", "embed_in", "embed_out")


def widens(tune: FineTune) -> bool:
    """Whether peft makes all that is not quantized fp32 before the first step, experts as well."""
    return tune.quantized and tune.loop not in AS_LOADED and not tune.unsloth


def grouped_matmul(gpu: Gpu) -> str:
    """How matmuls of several experts run (transformers integrations/moe.py; aten native/cuda/GroupedBlas.cpp)."""
    if gpu.kind != "cuda" or gpu.capability is None:
        return "looped"
    if gpu.capability[0] in (9, 10):
        return "at once"
    return "looped" if gpu.capability >= (8, 0) else "own"


def preferring(facts: ModelFacts, tune: FineTune) -> ModelFacts:
    """Return a model as TRL's trainers of preferences have it: no dropout, but for GRPO; scores for a head."""
    off: tuple[str, ...] = ()
    if tune.preferences and not tune.generates:
        off = "embedding_dropout", "residual_dropout", *(["attention_dropout"] if facts.model_type == "gpt2" else [])
    score = {"tied": False, "balanced": False} if tune.scores else {"balanced": False} if tune.whole else {}
    return facts.model_copy(update={**score, **dict.fromkeys(off, 0.0)})


class Lettered:
    """The facts of a model whose sizes know their letters, with as many layers as are run."""

    def __init__(self, facts: ModelFacts, tune: FineTune, layers: int, *, written: bool, masked: bool) -> None:
        self._facts, self.n_layer = facts, layers
        self.written_attention = written or facts.attention_softcap > 0
        self.padded = tune.attn != "flash_attention_2" if tune.joined else tune.padded and not tune.packing
        self.padded = self.padded or masked
        self.joined = tune.joined
        self.groups = Dim(facts.groups, 1, ("G",)) if facts.groups > 1 else 1
        self.tied = facts.tied and not is_untied(facts, tune)
        self.balanced = facts.balanced and tune.loop == "trl"
        self.scores = tune.scores

    def __getattr__(self, name: str) -> Any:
        value, letter = getattr(self._facts, name), LETTERS.get(name)
        found = self.__dict__[name] = Dim(value, 1, (letter,)) if letter and value else value
        return found


class Program:
    """A model as one way to fine-tune it runs. `weights`: all parameters, by name; frozen ones want no gradient."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        facts = preferring(facts, tune)
        self.facts, self.tune, self.attention = facts, tune, partial(attention_kernel, facts, tune, gpu)
        self.cuda, self.grouped = gpu.kind == "cuda", grouped_matmul(gpu)
        card = m.Card(self.cuda, gpu.capability, gpu.sm_count or 1, gpu.memory_bytes or 1 << 34)
        self.card = card if self.cuda else m.Card(cuda=False)
        self.dtype = self.loaded = DTYPES[tune.dtype]
        self.low = AMP[tune.amp]
        shards = self._shards(gpu)
        self.ranks = shards or OneCard()
        if tune.zero_stage:  # which sends a gradient to a bucket when it is there
            self.ranks = SendingGradients() if tune.zero_stage > 1 or tune.grad_accum == 1 else OneCard()
        in_half = bool(shards or tune.zero_stage)  # without autocast
        if in_half:
            self.dtype, self.low = self.low or self.dtype, None
        # peft's autocast_adapter_dtype, and what prepares a model in 4 bits for it: fp32 beside half-precision weights
        self.wide = self.dtype.itemsize == 2 and tune.loop not in HALF and not (in_half and AMP[tune.amp])
        self.unsloth = tune.unsloth_functions(facts.model_type)
        self.widened = self.wide and widens(tune)
        # a tile of the logits is all that is sure where a bound from below is asked for
        self.tiled = tune.loop == "trl" or tune.bound == "at_least" or tune.cut_cross_entropy
        self.tiled = self.tiled and self.unsloth is None and not tune.whole
        # SFTTrainer makes all that is trained bfloat16, last of all
        self.halved = tune.quantized and tune.loop == "trl" and not tune.unsloth
        self.adapter_dtype = bfloat16 if self.halved else float32 if self.wide else self.dtype
        # accelerate makes what a model gives within autocast fp32 (convert_outputs_to_fp32)
        self.logit_bytes = 4 if self.low or (self.widened and tune.loop != "axolotl") else self.dtype.itemsize
        whole = self._built(facts.n_layer)
        self.shards = shards.share(whole) if shards else []
        self.weights = {name: p for name, p in whole.named_parameters() if not name.startswith("copy.")}
        # weights that peft trains a copy of (ModulesToSaveWrapper): the original stays, frozen
        self.saved = {name: p for name, p in self.weights.items() if is_saved(facts, tune, name)}
        self.n_original = sum(p.numel() for p in self.saved.values())
        if is_untied(facts, tune):  # embedding and head had one, which is not counted twice
            self.n_original -= self.weights["embed_tokens.weight"].numel()
        if not self.trained():  # its layers have other names
            raise no_such_layers(facts, tune)
        linear = programs.load("foretrain.model.hub.linear")
        # out x in of each layer in 4 bits, and of each with an adapter
        parts = dict(whole.named_modules())
        self.packed = {name: part.shape for name, part in parts.items() if isinstance(part, linear.Linear4bit)}
        # and of each that unsloth makes whole in a place of all, in the order in which they run
        self.shared = [self.packed[name] for name, part in parts.items() if getattr(part, "in_place_of_all", False)]
        adapters = [part for part in parts.values() if isinstance(part, linear.Lora) and part is not whole.lm_head]
        self.adapted = [(part.lora_B.out_features, part.lora_A.in_features) for part in adapters]
        experts = programs.load("foretrain.model.hub.experts")  # and of each parameter with one that is not a layer
        folded = [part for part in parts.values() if isinstance(part, experts.Folded)]
        self.folded = [(part.lora_B.out_features, part.count * part.lora_A.in_features) for part in folded]
        if isinstance(whole.lm_head, linear.Lora):  # nor in 4 bits
            self.folded.append((whole.lm_head.lora_B.out_features, whole.lm_head.lora_A.in_features))
        special = (facts.sliding_layers, facts.layers_without_rotary, facts.dense_layers)
        alike = all(len(layers) in (0, facts.n_layer) for layers in special)
        alike = alike and not (tune.loop == "trl" and facts.balanced)  # a loss of what all layers gave
        self.groups = (facts.n_layer,) * (2 if tune.copies_reference else 1)
        self.run = (min(MOST, facts.n_layer),) * len(self.groups) if alike else self.groups
        self._recorders: dict[tuple[Any, ...], Recorder] = {}  # passes that were run, and unrolled
        self._structures: dict[tuple[Any, ...], Structure] = {}

    def _shards(self, gpu: Gpu) -> Shards | None:
        cards = cards_of(self.tune, gpu)
        if not cards or not self.tune.sharded:
            return None
        norm_in_head = not self.tune.adapters or self.facts.model_type in NORM_IN_HEAD
        return Shards(sharing_of(self.tune, cards), self.stored_bytes, norm_in_head=norm_in_head)

    def _built(self, layers: int, loader: programs.Loader = programs.EAGER, *, masked: bool = False) -> Any:
        """The model with so many layers; `masked`: its attention has a mask in any case."""
        tune, linear = self.tune, loader.load("foretrain.model.hub.linear")
        decoder = loader.load("foretrain.model.hub.decoder")
        preferences = loader.load("foretrain.model.hub.preferences")
        scored = preferences.RewardModel if tune.rewards else preferences.Classifier
        compared = preferences.Policy if tune.references else preferences.Pair
        compared = preferences.Group if tune.generates else compared
        kind = scored if tune.scores else compared if tune.preferences else decoder.Decoder
        modules.weights.set(self.dtype)
        dropout = 0.0 if tune.preferences and not tune.generates else tune.lora_dropout
        adapter = linear.Adapter(Dim(tune.lora_r, 1, ("r",)), dropout, self.wide, tune.method == "dora")
        bits = 4 if tune.method == "qlora" else 8
        packed = linear.Packed(self.low or self.dtype, self.dtype, tune.double_quant, bits, not tune.reentrant)
        kept = packed if tune.quantized else None
        kernels = self.facts.liger_kernels(tune.loop) if tune.liger and not tune.unsloth else None
        adapted = adapted_roles(self.facts, tune)
        # transformers' models return keys and values unless use_cache = False, as Trainers do; not while
        # they train with checkpoints
        cached = (False, not tune.gradient_checkpointing) if tune.loop == "own" and not tune.unsloth else ()
        build = decoder.Build(adapter if tune.adapters else None, adapted, kept, kernels, self.unsloth, cached)
        ways = {"checkpointing": tune.gradient_checkpointing, "reentrant": tune.reentrant, "offloads": tune.offloads}
        written = tune.attn == "eager" and not build.fast_blocks
        facts = Lettered(self.facts, tune, layers, written=written, masked=masked)
        model = kind(facts, build, **ways, keeps_logits=tune.keeps_logits, tiled=self.tiled)
        model.returns_logits = tune.loop == "own"
        if tune.copies_reference:
            model.copy = kind(facts, decoder.Build(), tiled=True)
            for number, block in enumerate(model.copy.layers, layers):
                block.__dict__["_layer"], block.self_attn.rotate = number, build.rotary
        self._prepare(model)
        modules.weights.set(float32)
        return model

    def _prepare(self, model: Any) -> None:
        """Freeze what is not trained, and give each weight the dtype that the trainer gives it."""
        for name, parameter in model.named_parameters():
            parameter.name = name
            lora = ".lora_" in name
            parameter.requires_grad = not self.tune.adapters or lora or is_saved(self.facts, self.tune, name)
            if lora:
                parameter.dtype = self.adapter_dtype
            elif self.halved and parameter.requires_grad:
                parameter.dtype = bfloat16
            elif self.widened and not self.converts_back(name):
                parameter.dtype = float32

    def converts_back(self, name: str) -> bool:
        """Whether a weight becomes fp32 and then has its own dtype again."""
        tied = self.facts.tied and name.startswith("embed_tokens")  # it is the head's as well
        *words, _ = own_words(self.facts.model_type, "lm_head.weight" if tied else name)
        return self.widened and self.tune.loop == "axolotl" and any(part in ".".join(words) for part in CONVERTED_BACK)

    def stored_bytes(self, weight: Parameter) -> int:
        """Of an element between passes, in a run that shards its weights."""
        if AMP[self.tune.amp] is None or self.tune.zero_stage:
            return weight.dtype.itemsize
        return 4 if weight.requires_grad else self.loaded.itemsize

    @property
    def zero(self) -> Zero | None:
        if not self.tune.zero_stage:
            return None
        trained, count = self.trained(), [p.numel() for p in self.weights.values()]
        inside = [p.numel() for name, p in self.weights.items() if name.startswith("layers.")]
        sizes = [p.numel() for p in trained.values()]
        of_run = self.tune.zero_stage, self.tune.world, self.tune.grad_accum > 1, self.dtype.itemsize
        largest = max(count), max(inside), max(sizes)
        return Zero(*of_run, sum(count), sum(sizes), *largest, int(self.facts.n_embd))

    @property
    def residual_bytes(self) -> int:
        return self.dtype.itemsize

    def sizes(self, symbols: dict[str, int]) -> dict[str, int]:
        return symbols

    def structure(
        self, symbols: dict[str, int], *, train: bool, state: State = FRESH, first: bool = False, before: str = ""
    ) -> Structure:
        """Return the passes of a micro-batch, for all layers; `state`: what it finds; `first`: it is the run's first;
        `before`: of another pass: "reference", "again" of the completion's model, "prompt" of generation."""
        asked = (*symbols.items(), train, state, first, before)
        while asked not in self._structures:
            given = partial(self.recorder, symbols, train=train, first=first, before=before)
            recorder = self.ranks.recorder(given, state)
            try:
                found = unroll(recorder, self.groups, self.run)
            except Uneven:
                self.run = self.groups
            else:
                self._structures[asked] = found
        return self._structures[asked]

    def recorder(
        self, symbols: dict[str, int], state: State = FRESH, *, train: bool, first: bool = False, before: str = ""
    ) -> Recorder:
        """The pass of the layers that are run; one that was run before is that one."""
        first = first and self.tune.offloads
        asked = (*symbols.items(), state, train, first, before, *self.run)
        if asked not in self._recorders:
            self._recorders[asked] = self._recorded(symbols, state, train=train, first=first, before=before)
        return self._recorders[asked]

    def _recorded(
        self, symbols: dict[str, int], state: State, *, train: bool, first: bool, before: str = ""
    ) -> Recorder:
        model = self._built(self.run[0])
        model.first_pass = first
        machine = self.ranks.machine(cuda=self.cuda, low=self.low, attention=self.attention)
        machine.wide_gradients, machine.grouped, machine.card = False, self.grouped, self.card
        t = machine.t = Recorder(symbols)
        modules.name_operations(model)
        self.ranks.wrap(model, machine)
        model.train(train or (self.tune.generates and bool(before)))
        machine.grad = train
        self.ranks.begin(t, state, saving=train)
        shape = (Dim(symbols["B"], 1, ("B",)), Dim(symbols["T"], 1, ("T",)))
        shapes = shape, shape[:1] if self.tune.scores else shape
        idx, labels = (m.Tensor(each, m.contiguous_strides(each), m.int64, None) for each in shapes)
        if self.tune.generates and self.cuda:
            machine.kept = Dim(symbols["B"] * symbols["L"], 1, ("B", "L"))
        with m.running(machine):
            loss, held = self._run_forward(model, machine, idx, labels, before)
            t.split = len(t.events)
            if train:
                root = [loss]
                del loss
                autograd.backward(root)
                self.ranks.end()
            else:
                del loss
                t.split = len(t.events)
            t.ended = True
        del held
        for parameter in model.parameters():
            parameter.grad = None
        return t

    def _run_forward(self, model: Any, machine: Any, idx: Any, labels: Any, before: str) -> tuple[Any, Any]:
        """The loss, or what stands for it in another pass, and what is held beside it."""
        tune, others = self.tune, None
        if tune.generates:
            return self._run_generating(model, machine, idx, labels, before)
        if tune.drifts:
            preferences = programs.load("foretrain.model.hub.preferences")
            others = preferences.Others(idx, labels, m.Tensor(idx.shape[:1], (1,), m.int64, None))
        if before:
            model.before(idx, labels, machine.autocast, others)
            return None, None
        if tune.whole:
            odds, predicts = tune.training == "orpo", tune.training != "simpo"
            return model.compared(idx, labels, machine.autocast, odds=odds, predicts=predicts), None
        if tune.references:
            reference = not tune.precompute_reference
            return model.compared(idx, labels, machine.autocast, reference=reference, others=others), None
        with machine.autocast():
            found = model(idx, labels)
            loss, *outputs = found if isinstance(found, tuple) else (found,)
            del found
            if self.low:  # accelerate's convert_outputs_to_fp32
                outputs = [each.float() for each in outputs]
        return loss, outputs

    def _run_generating(self, model: Any, machine: Any, idx: Any, mask: Any, before: str) -> tuple[Any, Any]:
        """The same of GRPO, whose step gets numbers that the passes before it made."""
        tune, length = self.tune, machine.t.symbols["L"]
        if before == "prompt":
            with contextlib.nullcontext() if tune.adapters else machine.autocast():
                cache = model.begun(idx)
            for part in (part for layer in cache for part in layer):
                made = machine.t.allocated[part.storage.serial]
                machine.t.allocated[part.storage.serial] = made._replace(component="kv_cache")
            return None, cache
        if before:
            return model.scored(idx, mask, length, machine.autocast, reference=before == "reference"), None
        sizes = (idx.shape[0], length), (idx.shape[0], 1)
        numbers, advantages = (m.Tensor(each, m.contiguous_strides(each), float32, None) for each in sizes)
        whole = tune.training == "rloo"
        old, reference = (numbers if on else None for on in (tune.scores_again, tune.references and not whole))
        written = programs.load("foretrain.model.hub.preferences").Written
        given = written(mask, advantages, length, old, reference, whole)
        return model.learned(idx, given, machine.autocast, tune.beta), None

    def trained(self) -> dict[str, Parameter]:
        return {name: p for name, p in self.weights.items() if p.requires_grad}


AMPERE = (8, 0)  # the first capability that FlashAttention 2 runs on (flash-attn csrc/flash_attn/flash_api.cpp)


def has_flash_2(gpu: Gpu) -> bool:
    """Whether the flash-attn package runs on a device; on a CPU its kernel is planned as PyTorch's own."""
    return gpu.kind != "cuda" or gpu.capability >= AMPERE


def attention_kernel(facts: ModelFacts, tune: FineTune, gpu: Gpu, learns: bool) -> str:
    """The kernel of causal attention without a mask."""
    if tune.attn == "flash_attention_2":
        return "flash"
    if gpu.kind != "cuda":  # sdp_utils_cpp.cpp: without dropout, and with any mask
        return "math" if learns and facts.attention_dropout else "flash"
    own = tune.unsloth_functions(facts.model_type)
    if own is not None and own.blocks and gpu.capability < AMPERE:  # xformers (utils/attention_dispatch.py)
        return "efficient"
    # Without autocast all that is not in 4 bits is fp32, and so is what it makes.
    wide = widens(tune) and tune.loop != "axolotl"
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(tune.amp, "float32" if wide else tune.dtype)
    width, heads = facts.head_dim, (facts.n_head, facts.n_kv_head, facts.n_kv_head)
    call = Call(half, (width, width, width), (2, 2), heads, grouped=facts.groups > 1, learns=learns,
                dropout=facts.attention_dropout if learns else 0.0)  # fmt: skip
    return kernel(gpu.capability, call, WITH_CUDNN if prefers_cudnn(gpu.capability) else USUAL) or "math"


def kernels_of(
    program: Program, symbols: dict[str, int], *, compiled: bool = False, before: str = ""
) -> Iterator[tuple[Kernel, int]]:
    """Each kernel, and how often it runs in all layers; `compiled`: as Inductor fuses them; `before`: Program's."""
    recorder = program.recorder(symbols, train=not before, before=before)
    found = recorder.kernels
    if compiled:
        found = fused(found, {serial for _, serial, _ in recorder.taken}, 1)
    copies = {OUTSIDE: 1, **{i: len(each) for i, each in enumerate(copies_of(program.groups, program.run))}}
    for each in found:
        yield each, copies[each.layer] * each.times


# What unsloth holds beside the model once a run has begun. models/llama.py: tables of rotary positions
# (LlamaRotaryEmbedding). kernels/utils.py: the place where 4-bit weights become whole (_scratch), smaller weights held
# until layers run again. unsloth_zoo/gradient_checkpointing.py: where offloaded tensors come back to, from the second
# pass on two.


class Places:
    """They come to life before the first passes. `alloc`: as Outside has it."""

    def __init__(self, program: Program, t: Timeline, alloc: Any) -> None:
        self.program, self.t, self.alloc = program, t, alloc
        self.passes = 0
        self.passing: list[Tensor] = []

    def before_a_pass(self) -> None:
        """Call it before each forward and backward pass of a training step."""
        own = self.program.unsloth
        if own is None or self.passes > 1:
            return
        before, self.passing = self.passing, []
        if not self.passes and own.blocks:
            self._tables()
            self._shared()
        if self.program.tune.offloads:
            self._staging()
        self.t.free(*before)
        self.passes += 1

    def _tables(self) -> None:
        facts, itemsize = self.program.facts, self.program.dtype.itemsize
        if facts.positions == "rotary":
            rows = table_rows(facts.max_positions, self.program.tune.seq_len)
            for _ in range(2):
                self.alloc("buffers", itemsize * rows * facts.head_dim)

    def _shared(self) -> None:
        """As large as the largest weight; those whose place it took stay for the first pass."""
        largest: list[int] = []
        for n_out, n_in in self.program.shared:
            if not largest or n_out * n_in > largest[-1]:
                largest.append(n_out * n_in)
        made = [self.alloc("buffers", self.program.dtype.itemsize * elements) for elements in largest]
        self.passing += made[:-1]

    def _staging(self) -> None:
        nbytes = self.t.size(self.program.residual_bytes, "B", "T", "C").nbytes
        if nbytes <= LEAST_OFFLOADED_BYTES:
            return
        self.alloc("buffers", nbytes, f"{self.program.residual_bytes}·B·T·C")
        if not self.passes:
            self.passing.append(self.alloc("buffers", LEAST_OFFLOADED_BYTES))


def notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """Which of unsloth's functions the figures are with, by stand-ins."""
    own = tune.unsloth_functions(facts.model_type)
    if own is None:
        return []
    adapted = adapted_roles(facts, tune)
    biased = {"qkv": facts.qkv_bias, "out": facts.out_bias, "mlp": facts.mlp_bias}
    groups = tuple(
        group for group in own.lora if adapted.issuperset(ROLES[group]) and not biased[group] and tune.method != "dora"
    )
    functions = ", ".join(functions_of(own, facts.model_type, groups))
    found = [Note(id="finetune_unsloth", values={"version": UNSLOTH_VERSION, "functions": functions})]
    if not own.blocks:
        found.append(Note(id="finetune_unsloth_compiled", values={"model": facts.model_type}))
    elif len(groups) < len(ROLES):
        found.append(Note(id="finetune_unsloth_peft", values={}))
    return [*found, *([Note(id="finetune_unsloth_host", values={})] if tune.offloads else [])]


# Micro-batches of a model that transformers' Trainer compiles with its loss, and no evaluation. The causal mask is made
# while it is traced (masking_utils.py, _ignore_causal_mask_sdpa), so keys and values are repeated.


def is_known(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> bool:
    """Whether the memory of a compiled run is estimated: that of plain code in the Trainer's loop. It is not with
    functions of bitsandbytes or Liger, mixtures of experts, masks of padding or windows, adapters in checkpoints."""
    plain = tune.method in ("full", "lora") and tune.loop == "trainer" and tune.attn == "sdpa"
    plain = plain and not tune.liger and not tune.unsloth and not tune.scores
    masked = tune.padded or tune.packing or facts.sliding_layers or facts.attention_softcap
    again = tune.gradient_checkpointing and (tune.adapters or tune.reentrant)
    return gpu.kind == "cuda" and plain and not masked and not again and not facts.n_expert


def program_of(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> Program:
    kind = CompiledProgram if tune.compile and is_known(facts, tune, gpu) else Program
    return kind(facts, tune, gpu)


class CompiledProgram(Program):
    """A model whose training passes are compiled. All of its layers are run."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        super().__init__(facts, tune, gpu)
        self.run = (facts.n_layer,)

    def sizes(self, symbols: dict[str, int]) -> dict[str, int]:
        """Return them with the memory-efficient kernel's, which runs with a mask where there is no cuDNN."""
        if self.attention(True) == "cudnn":
            return symbols
        s, half = symbols, (self.low or self.dtype).itemsize == 2
        inside = efficient_backward_bytes(s["B"], s["H"], s["T"], s["D"], half=half)
        return {**symbols, "flash": sum(inside), "split": 0}

    def first_pass(self, t: Timeline, there: int) -> list[Tensor]:
        """Writes the first micro-batch, whose kernels are timed where they can run in several ways. Returns its
        gradients. `there`: how many workspaces cuBLAS has."""
        structure = self.structure(t.symbols, train=True)
        return first_walk(t, structure.sized(t), structure, there, cuda=self.cuda).backward()

    def _recorded(
        self, symbols: dict[str, int], state: State, *, train: bool, first: bool, before: str = ""
    ) -> Recorder:
        if not train:
            return super()._recorded(symbols, state, train=train, first=first, before=before)
        model = self._built(self.run[0], LOADER, masked=True)
        machine = Compiler(cuda=self.cuda, low=self.low, attention=self.attention, functional=operations)
        machine.card = self.card
        return recorded(machine, symbols, model, self._forward)

    def _forward(self, model: Any, idx: Any, labels: Any) -> tuple[Any, Any]:
        logits = model.logits(idx)
        loss = LOADER.load("foretrain.model.hub.decoder").causal_loss(logits, labels)
        return loss, operations.to_float(logits) if self.low else logits  # accelerate's convert_outputs_to_fp32
