"""`FineTunePlan`: what a fine-tuning run will take on a card. Memory is estimated from the model's code or traced."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import NonNegativeInt

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.config.finetune.options import Bound, FineTune
from foretrain.config.hub.facts import LIGER_VERSION, UNKNOWN, UNNAMED, WITHOUT, ModelFacts, ModelSource, kernels_of
from foretrain.config.hub.parameters import parameters_of
from foretrain.config.hub.source import FOUR_BITS, dtype_of, quantization_of
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import Context
from foretrain.predict.finetune import program as unsloth
from foretrain.predict.finetune.generation import vllm_bytes
from foretrain.predict.finetune.memory import FineTuneEstimate, estimated
from foretrain.predict.finetune.outside import BLOCK
from foretrain.predict.finetune.program import DTYPES, has_flash_2, is_known, widens
from foretrain.predict.finetune.ranks import NORM_IN_HEAD, cards_of, not_planned
from foretrain.predict.finetune.targets import (
    MOST_NAMED,
    adapted_roles,
    check_saved,
    no_such_layers,
    redirected,
    saved_notes,
    unknown_names,
)
from foretrain.predict.finetune.time import StepWork, TracedWork, logged, timing
from foretrain.predict.finetune.traced import trace_alone
from foretrain.predict.memory import RunMemory
from foretrain.predict.plan import PlanRecord
from foretrain.predict.timing import PRICES, Prices, Timing

DEQUANTIZED = ("mxfp4",)  # formats that transformers turns into 16 bits for training (Mxfp4Config(dequantize=True))


class FineTuneCounts(Record):
    """Parameters: all of the model, its adapters and its copies of modules that are trained whole, and those that are
    trained, with the dtypes of their gradients."""

    n_params: int
    n_trained: int
    gradient_dtypes: tuple[str, ...]

    @classmethod
    def of(cls, estimate: FineTuneEstimate) -> "FineTuneCounts":
        return cls(n_params=estimate.n_params, n_trained=estimate.n_trained, gradient_dtypes=estimate.gradient_dtypes)


@dataclass(frozen=True)
class Answer:
    """Memory and counts of a run: from the estimate, or from a trace where there is none."""

    memory: RunMemory
    counts: FineTuneCounts
    estimate: FineTuneEstimate | None
    notes: tuple[Note, ...] = ()

    @classmethod
    def of(cls, source: ModelSource, tune: FineTune, gpu: Gpu, room: int | None) -> "Answer":
        """Raises UserError where the model can neither be estimated nor traced."""
        if source.facts is not None:
            estimate = estimated(source.facts, tune, gpu)
            return cls(estimate.judged(room, gpu.memory_bytes), FineTuneCounts.of(estimate), estimate)
        found = trace_alone(source, tune, gpu, room)
        return cls(found.memory, FineTuneCounts.model_validate(found.counts), None, found.notes)


class FineTunePlan(PlanRecord):
    """The forecast of one model, one way, one card. `bound`: what figures are of the run's, because of `bounded_by`."""

    kind: Literal["fine-tuning"] = "fine-tuning"
    name: str
    where: str
    facts: ModelFacts | None  # None: the model's real code was traced, of which `config` is the config.json
    config: dict[str, object] | None = None
    tune: FineTune
    gpu: Gpu
    counts: FineTuneCounts
    available_bytes: NonNegativeInt | None
    used_by_others_bytes: int
    memory: RunMemory
    timing: Timing | None
    notes: tuple[Note, ...] = ()
    bound: Bound = "exact"
    bounded_by: tuple[str, ...] = ()

    @property
    def source(self) -> ModelSource:
        return ModelSource(name=self.name, where=self.where, config=self.config or {}, facts=self.facts)

    @property
    def needs(self) -> RunMemory:
        return self.memory

    @property
    def place(self) -> str:
        cards = cards_of(self.tune, self.gpu)
        return cards.text if cards else self.gpu.name


def plan(
    source: ModelSource,
    tune: FineTune,
    gpu: Gpu,
    *,
    used_by_others_bytes: int = 0,
    prices: Prices = PRICES,
    unplanned: Mapping[str, Bound] = MappingProxyType({}),
) -> FineTunePlan:
    """Return the forecast, on a CPU without time. `unplanned`: settings with the bound of the figures. Raises UserError
    where the model is unknown, or the device is neither a card of CUDA's nor a CPU."""
    if tune.images:  # which no estimate has
        if source.facts and not source.facts.vision:
            raise UserError("usage.no_pictures", model=source.name)
        source = source.model_copy(update={"facts": None})
    facts = source.facts
    quantization = facts.quantization if facts else quantization_of(source.config)
    if quantization and quantization not in DEQUANTIZED:
        four_bits = quantization == FOUR_BITS
        id = "usage.four_bit_source" if four_bits else "usage.quantized_source"
        raise UserError(id, model=source.name, quantization=quantization, method=tune.method)
    if gpu.kind not in ("cuda", "cpu") or not gpu.is_trained_on:
        raise UserError("usage.finetune_needs_cuda", gpu=gpu.name)
    tune = resolved(source, tune, gpu)
    check_generation(tune, gpu)
    room = None if gpu.memory_bytes is None else max(0, gpu.memory_bytes - used_by_others_bytes)
    answer = Answer.of(source, tune, gpu, room)
    if (share := vllm_bytes(tune, gpu)) and source.facts:
        least = answer.counts.n_params * (4 if tune.method == "qlora" else 16) // 8
        least += 4 * source.facts.n_kv_head * source.facts.head_dim * source.facts.cached_tokens(tune.seq_len)
        if share < least:
            raise UserError("usage.vllm_share", share=share, gpu=gpu.name, least=least)
    bound = bound_of([tune.bound, *unplanned.values()])
    return FineTunePlan(
        name=source.name, where=source.where, facts=facts, config=None if facts else source.config, tune=tune, gpu=gpu,
        counts=answer.counts, available_bytes=room, used_by_others_bytes=used_by_others_bytes,
        memory=bounded(answer.memory, bound),
        timing=_timing(source, tune, gpu, room, prices) if bound == "exact" else None,
        notes=tuple(notes_of(source, tune, gpu, used_by_others_bytes, answer)), bound=bound,
        bounded_by=(*tune.bounded_by, *unplanned),
    )  # fmt: skip


def bound_of(bounds: Iterable[Bound]) -> Bound:
    """What several make of the figures together."""
    found: set[Bound] = {each for each in bounds if each != "exact"}
    return "exact" if not found else found.pop() if len(found) == 1 else "unknown"


def bounded(memory: RunMemory, bound: Bound) -> RunMemory:
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
    """Return the same with other options and prices; a log's step time was another step's: it is estimated again."""
    made = untimed(plan, **options)
    return made.model_copy(update={"timing": time_of(plan, made.tune)})


def retuned(plan: FineTunePlan, **options: object) -> FineTune:
    """The run with other options. Raises UserError for what this model or card cannot have."""
    tune = resolved(plan.source, FineTune.model_validate({**plan.tune.model_dump(), **options}), plan.gpu)
    if (plan.tune.preferences and not tune.preferences) or (plan.tune.scores and not tune.scores):
        raise UserError("usage.preferences_kernels", training=tune.training, option=f"--loop {tune.loop}")
    return tune


def untimed(plan: FineTunePlan, **options: object) -> FineTunePlan:
    """Return the same with other options, untimed, for a search. Raises UserError as `retuned` does."""
    tune = retuned(plan, **options)
    answer = Answer.of(plan.source, tune, plan.gpu, plan.available_bytes)
    memory = bounded(answer.memory, plan.bound)
    return plan.model_copy(update={"tune": tune, "counts": answer.counts, "memory": memory, "timing": None})


def time_of(plan: FineTunePlan, tune: FineTune) -> Timing | None:
    if plan.bound != "exact":
        return None
    prices = plan.timing.prices if plan.timing else PRICES
    return _timing(plan.source, tune, plan.gpu, plan.available_bytes, prices)


def timed(plan: FineTunePlan, step_s: float, prices: Prices = PRICES) -> FineTunePlan:
    """The same with the seconds of a step in a log."""
    return plan.model_copy(
        update={"timing": logged(work_of(plan.source, plan.tune, plan.gpu, plan.available_bytes), step_s, prices)}
    )


def work_of(source: ModelSource, tune: FineTune, gpu: Gpu, room: int | None) -> StepWork | TracedWork:
    """Return what a usual step runs; `room`: of its `Answer`, whose trace is kept. Raises UserError as that does."""
    tune = tune.usual
    if source.facts is not None:
        return StepWork(source.facts, tune, gpu)
    found = trace_alone(source, tune, gpu, room)
    return TracedWork(tune, gpu, found.work, found.shared)


def _timing(source: ModelSource, tune: FineTune, gpu: Gpu, room: int | None, prices: Prices) -> Timing | None:
    """Return a card's time; none of a CPU, whose rates nobody measured, nor of traced generation."""
    if tune.generates and source.facts is None:
        return None
    return timing(work_of(source, tune, gpu, room), prices) if gpu.kind == "cuda" else None


def resolved(source: ModelSource, tune: FineTune, gpu: Gpu) -> FineTune:
    """The options with `auto` decided. Raises UserError for what this model cannot have."""
    facts = source.facts
    tune = redirected(tune.model_copy(update={"unsloth": tune.unsloth or tune.loop == "unsloth"}))
    dtype: Any = tune.dtype
    tune = tune.model_copy(update={"amp": _amp(tune, gpu)})
    if dtype == "auto":  # unsloth loads any model in 16 bits
        published = facts.dtype if facts else dtype_of(source.config)
        dtype = published if not tune.unsloth else "bfloat16" if gpu.supports_bf16 else "float16"
    if tune.unsloth and not tune.adapters and dtype == "float16":
        dtype = "float32"  # unsloth models/vision.py: "Float16 full finetuning … upcast weights to float32"
    if not tune.adapters and dtype == "float16" and tune.amp == "fp16":
        raise UserError("usage.fp16_weights")
    if tune.zero_stage and tune.amp == "no" and dtype != "float32":  # engine.py, _configure_distributed_model
        raise not_planned(tune, f"amp = no, dtype = {dtype}")
    if facts is not None:
        _check_parts(facts, tune)
    elif option := next((name for name, on in ALONE.items() if on(tune)), ""):
        id = "usage.family_alone_loop" if tune.loop == option[2:] == "unsloth" else "usage.family_alone"
        raise UserError(id, option=option, model=str(source.config.get("model_type"))[:40])
    if tune.attn == "flash_attention_2" and dtype == "float32" and tune.amp == "no":
        raise UserError("usage.flash_needs_half")
    if tune.attn == "flash_attention_2" and not has_flash_2(gpu):
        raise UserError("usage.flash_needs_ampere", gpu=gpu.name, capability=".".join(map(str, gpu.capability)))
    asks = {"torch_compile": tune.compile, "unsloth": tune.unsloth, "use_liger_kernel": tune.liger}
    if (what := next((name for name, on in asks.items() if on), None)) and not gpu.has_triton:
        raise UserError("usage.needs_triton", what=what, gpu=gpu.name, capability=gpu.compute_capability)
    return tune.model_copy(update={"dtype": dtype})


def check_generation(tune: FineTune, gpu: Gpu) -> None:
    """Raise UserError for what TRL's GRPOTrainer refuses, or has no room for."""
    if not tune.generates:
        return
    if tune.completion_len >= tune.seq_len:
        raise UserError("usage.grpo_lengths", completion=tune.completion_len, seq_len=tune.seq_len)
    together = tune.world * tune.generated
    if together % tune.num_generations:
        raise UserError("usage.grpo_groups", training=tune.training, rows=together, each=tune.num_generations)
    if tune.vllm == "colocate" and gpu.kind != "cuda":
        raise UserError("usage.vllm_card", gpu=gpu.name)


# What is planned of models with an estimate alone, by option.
ALONE: Mapping[str, Callable[[FineTune], bool]] = {
    "--liger": lambda tune: tune.liger,
    "--unsloth": lambda tune: tune.unsloth,
    "--load-in-8bit": lambda tune: tune.load_in_8bit,
    "--vllm colocate": lambda tune: tune.generates and tune.vllm == "colocate",
}


def _check_parts(facts: ModelFacts, tune: FineTune) -> None:
    """Raise UserError for options that a model of these parts cannot have."""
    check_saved(facts, tune)
    if tune.scores and facts.model_type in WITHOUT_SCORE:
        raise UserError("usage.reward_model", model=facts.model_type)
    if (tune.preferences and tune.unsloth) or ((tune.scores or tune.whole) and (tune.unsloth or tune.liger)):
        option = "--unsloth" if tune.unsloth else "--liger"
        raise UserError("usage.preferences_kernels", training=tune.training, option=option)
    if tune.batch_size < tune.least_batch:
        raise UserError("usage.kto_batch")
    if (tune.references or tune.whole or tune.generates) and (tune.sharded or tune.zero_stage):
        raise not_planned(tune, f"training = {tune.training}")
    # The loss reads the head's weight, which nothing has gathered: accelerate finds no norm to gather it with.
    alone = not facts.tied and facts.model_type not in NORM_IN_HEAD
    if tune.sharded and not tune.zero_stage and tune.loop == "trl" and tune.adapters and alone:
        raise not_planned(tune, f"loop = trl, method = {tune.method}")
    if tune.adapters and not adapted_roles(facts, tune):
        raise no_such_layers(facts, tune)
    if tune.positions_beyond(facts):
        raise UserError("usage.seq_beyond", seq_len=tune.seq_len, most=facts.max_positions)


def _amp(tune: FineTune, gpu: Gpu) -> str:
    """Of QLoRA that of peft's and TRL's recipes: without autocast all that is not in 4 bits is fp32, which is large; of
    unsloth its trainer's; of ZeRO what DeepSpeed makes all weights. All else computes in the dtype of its weights."""
    half = "bf16" if gpu.supports_bf16 else "fp16"
    if tune.amp != "auto" and not (tune.amp == "bf16" and tune.unsloth):  # unsloth takes fp16 where bf16 is emulated
        return tune.amp
    return half if (tune.quantized or tune.unsloth or tune.zero_stage) and gpu.kind == "cuda" else "no"


def notes_of(source: ModelSource, tune: FineTune, gpu: Gpu, others_bytes: int, answer: Answer) -> list[Note]:
    found: list[Note] = []
    facts, estimate = source.facts, answer.estimate

    def note(id: str, **values: object) -> None:
        found.append(Note(id=id, values=values))

    if not others_bytes:
        note("others_unknown")
    if tune.fills_rows:
        note("finetune_rows", seq_len=tune.seq_len)
    if facts is None or estimate is None:
        model = str(source.config.get("model_type"))[:40]
        dequantized = quantization_of(source.config)
        if not tune.images:
            note("family_traced", model=model)
        if dequantized:
            note("family_dequantized", quantization=dequantized)
        if "vision_config" in source.config and not any(each.id in ("pictures", "rows") for each in answer.notes):
            note("no_pictures")
        paged = [Note(id="paged_optimizer", values={})] if tune.optim.startswith("paged") else []
        return [*found, *gpu.notes, *paged, *answer.notes]
    if cards := cards_of(tune, gpu):
        size = estimate.n_trained * max(DTYPES[name].itemsize for name in estimate.gradient_dtypes)
        nccl = estimate.context.expected_bytes - Context.of(gpu).expected_bytes
        link = f"{cards.link.name}, {cards.network.name}" if cards.network else cards.link.name
        more = estimate.beside.high_bytes - estimate.context.high_bytes
        zero = {"stage": tune.zero_stage, "more": more} if tune.zero_stage else {}
        id = "finetune_zero" if zero else "finetune_fsdp" if tune.sharded else "finetune_ddp"
        values = zero or ({} if tune.sharded else {"size": size})
        note(id, world=cards.world, link=link, nccl=nccl, **values)
    found += gpu.notes
    if source.code:
        note("remote_code")
    if names := unknown_names(facts, tune):
        note("finetune_no_modules", names=", ".join(names[:MOST_NAMED]), model=facts.model_type)
    if tune.seq_len > facts.max_positions:
        note("seq_beyond_trained", seq_len=tune.seq_len, most=facts.max_positions)
    if tune.optim.startswith("paged"):
        note("paged_optimizer")
    if facts.vision:
        note("no_pictures")
    if tune.compile and not is_known(facts, tune, gpu):
        note("finetune_compile")
    found += kind_notes(tune, gpu)
    if tune.joined and tune.attn != "flash_attention_2":
        _, tokens = tune.rows(tune.batch_size)
        note("packed_mask", tokens=tokens, size=tokens**2)
    found += saved_notes(facts, tune)
    found += _liger_notes(facts, tune) if tune.liger else []
    found += unsloth.notes(facts, tune)
    kept, most = estimate.kept_bytes
    if most:
        note("four_bits_unnamed" if facts.kept == UNNAMED else "four_bits_kept", kept=kept, most=most)
    return [*found, *four_bit_notes(estimate, tune), *expert_notes(facts, tune)]


def kind_notes(tune: FineTune, gpu: Gpu) -> list[Note]:
    """What TRL's trainers make of samples, beside a step."""
    found: list[Note] = []

    def note(id: str, **values: object) -> None:
        found.append(Note(id=id, values=values))

    if tune.preferences and tune.preferences.sequences > 1:
        note("finetune_pairs", batch=tune.batch_size, rows=tune.sequences)
    if tune.references:
        once = "finetune_reference_precomputed" if tune.precompute_reference else "finetune_reference_adapters"
        copied = "finetune_reference_generated" if tune.generates else "finetune_reference_copied"
        note(copied if tune.copies_reference else once)
    if tune.drifts:
        note("finetune_drift")
    if tune.generates:
        prompt = tune.seq_len - tune.completion_tokens
        note("finetune_generated", rows=tune.generated, prompt=prompt, completion=tune.completion_tokens)
    if tune.generates and tune.vllm == "colocate":
        note("finetune_vllm_colocate", size=vllm_bytes(tune, gpu))
    elif tune.generates and tune.vllm == "server":
        note("finetune_vllm_server")
    return found


def _liger_notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """Which of Liger's kernels the figures are with, by stand-ins."""
    loop = "unsloth" if tune.unsloth else tune.loop
    own = facts.liger_kernels(loop)
    if own is None:
        what = loop if loop in WITHOUT else facts.model_type
        id = "finetune_liger_unknown" if what in UNKNOWN else "finetune_liger_none"
        return [Note(id=id, values={"version": LIGER_VERSION, "what": what})]
    kernels = ", ".join(kernels_of(own, facts.activation))
    notes = [Note(id="finetune_liger", values={"version": LIGER_VERSION, "kernels": kernels})]
    return [*notes, *([] if own.loss else [Note(id="finetune_liger_trl", values={})])]


EXPERTS = {"expert_gate_up", "expert_down"}  # roles of their adapters
WITHOUT_SCORE = ("granite", "olmoe", "ernie4_5")  # families without a ForSequenceClassification in transformers 5.23


def expert_notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """Return notes of a mixture: time rests on an even split. The bound: one expert has at most all tokens."""
    if not facts.n_expert:
        return []
    tokens = tune.sequences * tune.seq_len
    rows = tokens * facts.experts_per_token
    values = {"taken": facts.experts_per_token, "experts": facts.n_expert, "rows": rows, "most": tokens}
    found = [Note(id="experts_even", values={**values, "even": -(-rows // facts.n_expert)})]
    elements = sum(each.elements for each in parameters_of(facts) if each.role == "expert")
    item_bytes = 4 if widens(tune) else DTYPES[tune.dtype].itemsize
    if tune.method == "qlora":
        found.append(Note(id="experts_not_packed", values={"count": elements, "size": item_bytes * elements}))
    if adapted_roles(facts, tune) & EXPERTS:
        found.append(Note(id="experts_copied", values={"size": item_bytes * elements}))
    return found


def four_bit_notes(estimate: FineTuneEstimate, tune: FineTune) -> list[Note]:
    """A note where what peft makes fp32 for QLoRA can be more than 4 bits save. That is so at most where half of what a
    step has beside weights is more: the numbers between layers are twice as wide, others are not."""
    itemsize = DTYPES[tune.dtype].itemsize
    wide = sum(4 * p.numel() for name, p in estimate.weights.items() if ".lora_" not in name and p.dtype.itemsize == 4)
    if tune.method != "qlora" or itemsize == 4 or not wide:
        return []
    scale_bytes = 1 if tune.double_quant else 4
    packed = sum(math.prod(shape) for shape in estimate.packed.values())
    saved = round(packed * (itemsize - 0.5 - scale_bytes / BLOCK))
    worst = estimate.memory.worst
    beside = worst.tensors_bytes - sum(row.size_bytes for row in worst.components if row.id == "weights")
    if saved - wide // 2 >= beside / 2:
        return []
    return [Note(id="four_bits_widened", values={"wide": wide, "saved": saved})]
