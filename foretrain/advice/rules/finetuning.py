"""Rules of fine-tuning: what can be changed in such a run. Each sets options of a plan."""

from collections.abc import Callable

from foretrain.advice.rules.base import rule_of_options as rule
from foretrain.config.finetune.options import PEFT_TARGETS, FineTune
from foretrain.predict.finetune.plan import EXPERTS, FineTunePlan
from foretrain.predict.finetune.program import has_flash_2
from foretrain.predict.finetune.targets import adapted_roles

LEAST_RANK = 8  # of an adapter: advice goes no lower
HIGHEST_RANK = 256  # and no higher: the highest that was compared with full fine-tuning
SHORTEST = 512  # tokens of a sequence: nor here
OFFLOADED = 512  # tokens of a sequence from which on unsloth moves checkpoints to the host
ATTENTION_ALONE = "q_proj,k_proj,v_proj,o_proj"  # the layers of a mixture that are no experts
MOVABLE = ("trainer", "trl")  # loops that no file of a trainer's holds a run to

_ADAMW = ("adamw_torch_fused", "adamw_torch")
Values = dict[str, bool | int | str]
Try = Callable[[FineTunePlan], Values]


def _checkpointing(plan: FineTunePlan) -> Values:
    return {} if plan.tune.gradient_checkpointing else {"gradient_checkpointing": True}


def _unmerged(plan: FineTunePlan) -> Values:
    return {"merge": False} if plan.tune.merges else {}


def _offload(plan: FineTunePlan) -> Values:
    tune = plan.tune
    if not tune.unsloth or tune.offloads or tune.seq_len < OFFLOADED:
        return {}
    return {"gradient_checkpointing": True, "offload_checkpoints": True}


def _unsloth(plan: FineTunePlan) -> Values:
    """unsloth's loop and kernels, with its checkpoints; on cards that run Triton. It loads weights in 16 bits."""
    tune = plan.tune
    if tune.unsloth or tune.loop not in MOVABLE or not plan.gpu.has_triton or tune.dtype == "float32":
        return {}
    offloads = {"offload_checkpoints": True} if tune.seq_len >= OFFLOADED else {}
    return {"loop": "unsloth", "gradient_checkpointing": True, "amp": _half(plan), **offloads}


def _trl(plan: FineTunePlan) -> Values:
    """TRL's trainer, whose loss makes logits in tiles, and which leaves what is not quantized in 16 bits."""
    return {"loop": "trl"} if plan.tune.loop == "trainer" and not plan.tune.unsloth else {}


def _half(plan: FineTunePlan) -> str:
    tune = plan.tune
    return tune.amp if tune.amp != "no" else "fp16" if tune.dtype == "float16" else "bf16"


def _smaller_batch(plan: FineTunePlan) -> Values:
    tune = plan.tune
    times, rest = divmod(tune.batch_size, tune.least_batch)
    return {} if rest or times == 1 else _parted(tune, times)


def _parted(tune: FineTune, by: int) -> Values:
    """As many samples a step, and completions that are generated together, in smaller micro-batches."""
    together = {"steps_per_generation": tune.steps_per_generation * by} if tune.steps_per_generation else {}
    return {"batch_size": tune.batch_size // by, "grad_accum": tune.grad_accum * by, **together}


def _half_batch(plan: FineTunePlan, by: int = 2) -> Values:
    tune = plan.tune
    if tune.batch_size % by or tune.batch_size == by * tune.least_batch:
        return {}
    return _parted(tune, by)


def _quarter_batch(plan: FineTunePlan) -> Values:
    return _half_batch(plan, 4)


def _evaluated(plan: FineTunePlan, sequences: int) -> Values:
    tune = plan.tune
    if not tune.evaluate or tune.eval_batch_size <= sequences:
        return {}
    whole = tune.eval_batches * tune.eval_batch_size
    return {"eval_batch_size": sequences, "eval_batches": -(-whole // sequences)}


def _half_evaluation(plan: FineTunePlan) -> Values:
    half, odd = divmod(plan.tune.eval_batch_size, 2)
    return {} if odd or half == 1 else _evaluated(plan, half)


def _evaluation_of_one(plan: FineTunePlan) -> Values:
    return _evaluated(plan, 1)


def _logits_to_host(plan: FineTunePlan) -> Values:
    """The Trainer moves what an evaluation collects to the host after each batch; the metrics are the same."""
    tune = plan.tune
    kept = tune.evaluate and tune.keeps_logits
    return {"eval_accumulation_steps": 1} if kept and tune.eval_accumulation_steps != 1 else {}


def _loss_alone(plan: FineTunePlan) -> Values:
    """prediction_loss_only: an evaluation collects nothing, so compute_metrics gets nothing."""
    return {"keeps_logits": False} if plan.tune.evaluate and plan.tune.keeps_logits else {}


def _precomputed(plan: FineTunePlan) -> Values:
    """The reference's passes come first, once, so that no copy of the model is there while it trains."""
    return {"precompute_reference": True} if plan.tune.copies_reference and not plan.tune.generates else {}


def _optimizer(plan: FineTunePlan) -> Values:
    return {"optim": "adamw_8bit"} if plan.tune.optim in _ADAMW else {}


def _attention(plan: FineTunePlan) -> Values:
    return {"attn": "sdpa"} if plan.tune.attn == "eager" else {}


def _flash(plan: FineTunePlan) -> Values:
    """A padded batch and joined rows need a mask; flash attention in sdpa takes none, FlashAttention 2 needs none."""
    tune = plan.tune
    half = tune.dtype != "float32" or tune.amp != "no"
    masked = tune.joined or (tune.padded and not tune.packing)
    runs = half and has_flash_2(plan.gpu)
    return {"attn": "flash_attention_2"} if masked and tune.attn == "sdpa" and runs else {}


def _liger(plan: FineTunePlan) -> Values:
    tune = plan.tune
    without = tune.liger or tune.unsloth or plan.facts is None or plan.facts.liger_kernels(tune.loop) is None
    return {} if without else {"liger": True}


def _paged(plan: FineTunePlan) -> Values:
    """Its states lie in managed memory, which is the computer's while the card is full."""
    return {"optim": "paged_adamw_8bit"} if plan.tune.optim in (*_ADAMW, "adamw_8bit") else {}


def _lower_rank(plan: FineTunePlan) -> Values:
    tune = plan.tune
    return {"lora_r": max(LEAST_RANK, tune.lora_r // 2)} if tune.adapters and tune.lora_r > LEAST_RANK else {}


def _fewer_targets(plan: FineTunePlan) -> Values:
    """Of a mixture the attention's layers, as adapters of experts copy these; else those that peft takes by itself."""
    tune, facts = plan.tune, plan.facts
    if not tune.adapters or facts is None:
        return {}
    whole = tune.lora_targets == "all-linear"
    if facts.n_expert:
        return {"lora_targets": ATTENTION_ALONE} if whole or adapted_roles(facts, tune) & EXPERTS else {}
    return {"lora_targets": PEFT_TARGETS.get(facts.model_type, "q_proj,v_proj")} if whole else {}


def _unpadded(plan: FineTunePlan) -> Values:
    tune = plan.tune
    return {"padded": False, "packing": True} if tune.padded and not tune.packing and not tune.preferences else {}


def _lora(plan: FineTunePlan) -> Values:
    return {"method": "lora"} if plan.tune.method == "full" else {}


def _sixteen_bits(plan: FineTunePlan) -> Values:
    """Of a small model all that is made fp32 for 4 bits can be more than these save."""
    return {"method": "lora", "amp": plan.tune.amp} if plan.tune.method == "qlora" else {}


def _qlora(plan: FineTunePlan) -> Values:
    tune = plan.tune
    if tune.method not in ("full", "lora"):
        return {}
    return {"method": "qlora", "amp": _half(plan)}


def _instead(method: Try, loop: Try) -> Try:
    """Adapters instead of all weights, as another loop runs them: it alone saves little of a run of all."""

    def values(plan: FineTunePlan) -> Values:
        by = {} if plan.tune.adapters else loop(plan)
        return {**by, **method(plan)} if by else {}

    return values


def _shorter(plan: FineTunePlan) -> Values:
    return _of_length(plan.tune, plan.tune.seq_len // 2) if plan.tune.seq_len > 2 * SHORTEST else {}


def _shortest(plan: FineTunePlan) -> Values:
    return _of_length(plan.tune, SHORTEST) if plan.tune.seq_len > SHORTEST else {}


def _of_length(tune: FineTune, tokens: int) -> Values:
    own = {"completion_len": max(1, tune.completion_len * tokens // tune.seq_len)} if tune.generates else {}
    return {"seq_len": tokens, **own}


def _whole_activations(plan: FineTunePlan) -> Values:
    tune = plan.tune
    ways: Values = {name: False for name in ("offload_checkpoints", "reentrant") if getattr(tune, name)}
    return {"gradient_checkpointing": False, **ways} if tune.gradient_checkpointing else {}


def _larger_batch(plan: FineTunePlan) -> Values:
    tune = plan.tune
    if tune.grad_accum % 2 or tune.steps_per_generation:
        return {}
    return {"batch_size": 2 * tune.batch_size, "grad_accum": tune.grad_accum // 2}


def _fused(plan: FineTunePlan) -> Values:
    return {"optim": "adamw_torch_fused"} if plan.tune.optim == "adamw_torch" else {}


def _all_linear(plan: FineTunePlan) -> Values:
    tune = plan.tune
    fewer = tune.adapters and tune.lora_targets != "all-linear" and not (plan.facts and plan.facts.n_expert)
    return {"lora_targets": "all-linear"} if fewer else {}


def _higher_rank(plan: FineTunePlan) -> Values:
    tune = plan.tune
    return {"lora_r": min(HIGHEST_RANK, 4 * tune.lora_r)} if tune.adapters and tune.lora_r < HIGHEST_RANK else {}


def _full(plan: FineTunePlan) -> Values:
    return {"method": "full", "dtype": "float32", "amp": _half(plan)} if plan.tune.adapters else {}


def _fp32_weights(plan: FineTunePlan) -> Values:
    tune = plan.tune
    return {"dtype": "float32", "amp": _half(plan)} if tune.method == "full" and tune.dtype != "float32" else {}


# Of rules that set the same option the last saves most; those that it names as milder fit alone only where it does.
# unsloth's kernels and TRL's tiles stand in the place of liger's. `toll`: loss_alone gives up what an evaluation
# measures.
_SAME = (
    rule("unmerged", "memory", "exact", _unmerged),
    rule("checkpointing", "memory", "exact", _checkpointing),
    rule("half_batch", "memory", "exact", _half_batch),
    rule("quarter_batch", "memory", "exact", _quarter_batch),
    rule("batch_of_one", "memory", "exact", _smaller_batch, milder=("quarter_batch", "half_batch")),
    rule("attention", "both", "exact", _attention),
    rule("flash", "both", "exact", _flash),
    rule("packing", "both", "exact", _unpadded),
    rule("liger", "both", "exact", _liger),
    rule("offload", "memory", "exact", _offload),
    rule("logits_to_host", "memory", "exact", _logits_to_host),
    rule("half_evaluation", "memory", "exact", _half_evaluation),
    rule("evaluation_of_one", "memory", "exact", _evaluation_of_one, milder=("half_evaluation",)),
    rule("loss_alone", "memory", "exact", _loss_alone, instead_of=("logits_to_host",), toll=1.0),
    rule("precomputed", "memory", "exact", _precomputed),
    rule("trl", "memory", "exact", _trl, instead_of=("liger",)),
    rule("unsloth", "memory", "exact", _unsloth, instead_of=("liger",)),
)
_OTHER = (
    rule("optimizer_8bit", "memory", "other optimizer", _optimizer),
    rule("paged", "memory", "other optimizer", _paged, milder=("optimizer_8bit",)),
    rule("lower_rank", "memory", "other model", _lower_rank),
    rule("fewer_targets", "both", "other model", _fewer_targets),
    rule("lora", "both", "other model", _lora),
    rule("qlora", "memory", "other model", _qlora),
    rule("sixteen_bits", "memory", "other model", _sixteen_bits),
    rule("lora_of_trl", "memory", "other model", _instead(_lora, _trl)),
    rule("qlora_of_trl", "memory", "other model", _instead(_qlora, _trl)),
    rule("qlora_of_unsloth", "memory", "other model", _instead(_qlora, _unsloth)),
    rule("shorter", "memory", "other model", _shorter),
    rule("shortest", "memory", "other model", _shortest, milder=("shorter",)),
)
_SPENDING = (
    rule("whole_activations", "speed", "exact", _whole_activations),
    rule("larger_batch", "speed", "exact", _larger_batch),
    rule("fused", "speed", "exact", _fused),
)
# What learns more from the same data by published comparisons, the least change first.
_BETTER = (
    rule("all_linear", "quality", "other model", _all_linear, "arXiv:2405.09673"),
    rule("higher_rank", "quality", "other model", _higher_rank, "arXiv:2405.09673"),
    rule("full", "quality", "other model", _full, "arXiv:2405.09673"),
    rule("fp32_weights", "quality", "exact", _fp32_weights, "arXiv:2010.06192"),
)
TUNING = {each.id: each for each in (*_SAME, *_OTHER, *_SPENDING, *_BETTER)}
