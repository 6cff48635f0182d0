"""A run in the words of transformers' TrainingArguments, peft's LoraConfig and BitsAndBytesConfig."""

from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.words import names_in

ALL_LINEAR = ("all-linear", "all")


def trainer_arguments(tune: FineTune) -> dict[str, Any]:
    """Return what decides the memory and the time of a step, but for how long the run is."""
    found: dict[str, Any] = {
        "per_device_train_batch_size": tune.batch_size,
        "per_device_eval_batch_size": tune.eval_batch_size,
        "gradient_accumulation_steps": tune.grad_accum,
        "gradient_checkpointing": tune.gradient_checkpointing,
        "optim": tune.optim,
        "max_grad_norm": tune.max_grad_norm,
        "bf16": tune.amp == "bf16",
        "fp16": tune.amp == "fp16",
        "eval_strategy": "steps" if tune.evaluate else "no",
        "torch_compile": tune.compile,
        "use_liger_kernel": tune.liger and not tune.unsloth,
    }
    if tune.gradient_checkpointing:
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": tune.reentrant}
    if tune.eval_accumulation_steps:
        found["eval_accumulation_steps"] = tune.eval_accumulation_steps
    if tune.sharded:
        found |= {"fsdp": True, "fsdp_config": {"reshard_after_forward": tune.strategy == "fsdp"}}
    if tune.adapters and not tune.looks_for_unused:
        found["ddp_find_unused_parameters"] = False
    return found


def adapter_arguments(tune: FineTune) -> dict[str, Any]:
    targets, saved = names_in(tune.lora_targets), names_in(tune.lora_saved)
    return {
        "r": tune.lora_r,
        "lora_alpha": 2 * tune.lora_r,
        "lora_dropout": tune.lora_dropout,
        "task_type": "SEQ_CLS" if tune.scores else "CAUSAL_LM",
        "target_modules": "all-linear" if any(name in ALL_LINEAR for name in targets) else targets,
        "modules_to_save": saved or None,
        "use_dora": tune.method == "dora",
    }


def four_bit_arguments(tune: FineTune) -> dict[str, Any]:
    """Return those of matmuls in autocast's dtype, else in that of the weights."""
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": tune.double_quant,
        "bnb_4bit_compute_dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(tune.amp, tune.dtype),
    }
