"""What can be changed in a fine-tuning run, and a run with some of it, planned."""

from collections.abc import Callable

from foretrain.config.finetune.read import PEFT_TARGETS
from foretrain.predict.finetune.plan import EXPERTS, FineTunePlan
from foretrain.predict.finetune.program import has_flash_2
from foretrain.predict.finetune.targets import adapted_roles

LEAST_RANK = 8  # of an adapter: advice goes no lower
HIGHEST_RANK = 256  # and no higher: the highest that was compared with full fine-tuning
SHORTEST = 512  # tokens of a sequence: nor here
OFFLOADED = 512  # tokens of a sequence from which on unsloth moves checkpoints to the host
ATTENTION_ALONE = "q_proj,k_proj,v_proj,o_proj"  # the layers of a mixture that are no experts
MOVABLE = ("trainer", "trl")  # loops that no file of a trainer's holds a run to
ALONE = {"sixteen_bits"}  # beside others four bits take less
# Of two such changes one leaves the other nothing to do: unsloth's kernels and TRL's tiles stand in the place of
# liger's.
IDLE_TOGETHER = ({"logits_to_host", "loss_alone"}, {"liger", "unsloth"}, {"liger", "trl"})

_ADAMW = ("adamw_torch_fused", "adamw_torch")
Values = dict[str, bool | int | str]
Try = Callable[[FineTunePlan], Values]


def _checkpointing(plan: FineTunePlan) -> Values:
    return {} if plan.tune.gradient_checkpointing else {"gradient_checkpointing": True}


def _offload(plan: FineTunePlan) -> Values:
    tune = plan.tune
    if not tune.unsloth or tune.offloads or tune.seq_len < OFFLOADED:
        return {}
    return {"gradient_checkpointing": True, "offload_checkpoints": True}


def _unsloth(plan: FineTunePlan) -> Values:
    """unsloth's loop and kernels, with its checkpoints; on cards that run Triton."""
    tune = plan.tune
    if tune.unsloth or tune.loop not in MOVABLE or not plan.gpu.has_triton:
        return {}
    offloads = {"offload_checkpoints": True} if tune.seq_len >= OFFLOADED else {}
    return {"loop": "unsloth", "gradient_checkpointing": True, "amp": _half(plan), **offloads}


def _trl(plan: FineTunePlan) -> Values:
    """TRL's trainer, whose loss makes logits in tiles, and which leaves what is not quantized in 16 bits."""
    return {"loop": "trl"} if plan.tune.loop == "trainer" and not plan.tune.unsloth else {}


def _half(plan: FineTunePlan) -> str:
    """The 16 bits in which a run computes, or would."""
    tune = plan.tune
    return tune.amp if tune.amp != "no" else "fp16" if tune.dtype == "float16" else "bf16"


def _smaller_batch(plan: FineTunePlan) -> Values:
    tune = plan.tune
    if tune.batch_size == 1:
        return {}
    return {"batch_size": 1, "grad_accum": tune.grad_accum * tune.batch_size}


def _half_batch(plan: FineTunePlan, by: int = 2) -> Values:
    tune = plan.tune
    if tune.batch_size % by or tune.batch_size == by:
        return {}
    return {"batch_size": tune.batch_size // by, "grad_accum": tune.grad_accum * by}


def _quarter_batch(plan: FineTunePlan) -> Values:
    return _half_batch(plan, 4)


def _evaluated(plan: FineTunePlan, sequences: int) -> Values:
    """As many sequences are evaluated, in smaller batches."""
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


def _optimizer(plan: FineTunePlan) -> Values:
    return {"optim": "adamw_8bit"} if plan.tune.optim in _ADAMW else {}


def _attention(plan: FineTunePlan) -> Values:
    return {"attn": "sdpa"} if plan.tune.attn == "eager" else {}


def _flash(plan: FineTunePlan) -> Values:
    """A padded batch needs a mask, and so do rows that are joined; flash attention in sdpa takes none, FlashAttention 2
    does, or needs none."""
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
    return {"padded": False, "packing": True} if plan.tune.padded and not plan.tune.packing else {}


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
    return {"seq_len": plan.tune.seq_len // 2} if plan.tune.seq_len > 2 * SHORTEST else {}


def _shortest(plan: FineTunePlan) -> Values:
    return {"seq_len": SHORTEST} if plan.tune.seq_len > SHORTEST else {}


# The training stays the same with the first ones, and is another one with the others. Of those that set the same
# option the last saves most.
SAME: dict[str, Try] = {
    "checkpointing": _checkpointing, "half_batch": _half_batch, "quarter_batch": _quarter_batch,
    "batch_of_one": _smaller_batch, "attention": _attention, "flash": _flash, "packing": _unpadded, "liger": _liger,
    "offload": _offload, "logits_to_host": _logits_to_host, "half_evaluation": _half_evaluation,
    "evaluation_of_one": _evaluation_of_one, "loss_alone": _loss_alone, "trl": _trl, "unsloth": _unsloth,
}  # fmt: skip
OTHER: dict[str, Try] = {
    "optimizer_8bit": _optimizer, "paged": _paged, "lower_rank": _lower_rank, "fewer_targets": _fewer_targets,
    "lora": _lora, "qlora": _qlora, "sixteen_bits": _sixteen_bits, "lora_of_trl": _instead(_lora, _trl),
    "qlora_of_trl": _instead(_qlora, _trl), "qlora_of_unsloth": _instead(_qlora, _unsloth),
    "shorter": _shorter, "shortest": _shortest,
}  # fmt: skip
OPTIMIZERS = {"optimizer_8bit", "paged"}  # of these, changes of the optimizer alone


def _whole_activations(plan: FineTunePlan) -> Values:
    tune = plan.tune
    ways: Values = {name: False for name in ("offload_checkpoints", "reentrant") if getattr(tune, name)}
    return {"gradient_checkpointing": False, **ways} if tune.gradient_checkpointing else {}


def _larger_batch(plan: FineTunePlan) -> Values:
    tune = plan.tune
    if tune.grad_accum % 2:
        return {}
    return {"batch_size": 2 * tune.batch_size, "grad_accum": tune.grad_accum // 2}


def _fused(plan: FineTunePlan) -> Values:
    return {"optim": "adamw_torch_fused"} if plan.tune.optim == "adamw_torch" else {}


# What takes more memory and less time; the training stays the same.
SPENDING: dict[str, Try] = {
    "whole_activations": _whole_activations, "larger_batch": _larger_batch, "fused": _fused,
}  # fmt: skip


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


# What learns more from the same data by published comparisons, the least change first: arXiv:2405.09673 compares
# targets, ranks and full fine-tuning, arXiv:2010.06192 weights in bfloat16.
_FOR_ADAPTERS = {"all_linear": _all_linear, "higher_rank": _higher_rank, "full": _full}
BETTER: dict[str, Try] = {**_FOR_ADAPTERS, "fp32_weights": _fp32_weights}
# Changes of which a stronger one sets the same option: alone they fit only where that one does.
MILDER = {
    "batch_of_one": ("quarter_batch", "half_batch"), "evaluation_of_one": ("half_evaluation",),
    "paged": ("optimizer_8bit",), "shortest": ("shorter",),
}  # fmt: skip
FASTER = (*SPENDING, "attention", "flash", "packing", "liger", "fewer_targets", "lora")  # what can be quicker
