"""transformers' TrainingArguments as JSON or YAML, with keys of peft, bitsandbytes and foretrain, and accelerate's
config."""

from collections.abc import Mapping
from typing import Any, get_args

from foretrain.config.finetune.formats.format import (
    Format,
    adapter_keys,
    attention,
    method_of,
    refuse_two_precisions,
    training,
    training_arguments,
)
from foretrain.config.finetune.formats.sharding import shards
from foretrain.config.finetune.formats.trl import preferences
from foretrain.config.finetune.options import OPTION_OF, Method
from foretrain.config.finetune.table import Table, known_keys

_MODEL = ("model_name_or_path", "model", "base_model", "model_name", "model_id")


def read(table: Table, text: str) -> None:
    for key in _MODEL:
        table.found.model = table.found.model or table.word(key) or None
    preferences(table)
    for key in ("training", "stage", "rl", "rlhf_type"):
        if table.keys.get(key) is not None:
            training(table, table.take(key), key)
    if table.found.values.get("training") == "classification":
        table.put("labels", "num_labels")
    training_arguments(table)
    weights(table)
    for key in [*table.keys]:  # foretrain's own words and their spellings
        if key not in table.taken and key in OPTION_OF:
            table.put(OPTION_OF[key], key)
    table.rest(known=known_keys("training", "adapter", "trainer"))


def weights(table: Table) -> None:
    """Method, dtype and attention, by the names of peft and bitsandbytes or by foretrain's own."""
    four_bit = table.flag("load_in_4bit")
    named = table.take("method", table.take("finetuning_type"))
    refuse_two_precisions(table, four_bit or named == "qlora", "load_in_8bit", "fp8", "load_in_fp8")
    rank = next((key for key in ("lora_r", "lora_rank") if table.keys.get(key) is not None), None)
    if named is not None:
        key = "method" if "method" in table.keys else "finetuning_type"
        if table.give("method", named, key) and four_bit and named in ("lora", "dora"):
            method_of(table, "load_in_4bit", adapters=True, four_bit=True, dora=named == "dora")
    elif table.flag("use_peft", default=rank is not None):
        key = "use_peft" if "use_peft" in table.keys else rank or "use_peft"
        method_of(table, key, adapters=True, four_bit=four_bit, dora=table.flag("use_dora"))
        table.found.peft_targets = not any(table.keys.get(key) for key in ("lora_target_modules", "target_modules"))
    elif four_bit:
        table.unplanned("load_in_4bit", True)
    if four_bit:
        table.found.values["double_quant"] = False  # BitsAndBytesConfig's default
    adapter_keys(table)
    table.put("double_quant", "bnb_4bit_use_double_quant", "use_bnb_nested_quant")
    table.put("dtype", "torch_dtype", "dtype", "model_dtype")
    attention(table, "attn_implementation")


def read_accelerate(table: Table, text: str) -> None:
    table.give("amp", table.word("mixed_precision", "no"), "mixed_precision")
    table.cards("num_processes")
    shards(table, deepspeed=("deepspeed_config",), fsdp=("fsdp_config",))
    table.rest(known=known_keys("accelerate"))


_KEYS = frozenset(("num_train_epochs", "per_device_eval_batch_size", "lr_scheduler_type", "eval_strategy",
    "evaluation_strategy", "save_strategy", "logging_strategy", "save_total_limit", "adam_beta1", "adam_beta2",
    "dataloader_num_workers", "remove_unused_columns", "gradient_checkpointing_kwargs", "load_best_model_at_end",
    "metric_for_best_model", "gradient_accumulation_steps", "lora_targets", "lora_saved", "dataset_tokens",
    "keeps_logits", "offload_checkpoints", "grad_accum"))  # fmt: skip


def _fits(table: Mapping[str, Any]) -> bool:
    """The word of TrainingArguments for the micro-batch, or foretrain's own for how the weights are trained."""
    return "per_device_train_batch_size" in table or table.get("method") in get_args(Method)


FORMAT = Format("trainer", _KEYS, read, _fits)
ACCELERATE = Format(
    "accelerate", frozenset(("compute_environment", "distributed_type", "num_processes", "machine_rank")),
    read_accelerate, lambda table: "compute_environment" in table and "distributed_type" in table,
)  # fmt: skip
