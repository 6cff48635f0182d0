"""unsloth's arguments, flat or in sections (unsloth_cli/config.py). Defaults: unsloth/models/loader.py, llama.py."""

from collections.abc import Mapping
from typing import Any

from foretrain.config.finetune.formats.format import (
    Format,
    adapter_keys,
    checkpointing,
    method_of,
    refuse_two_precisions,
    training_arguments,
)
from foretrain.config.finetune.formats.trl import preferences
from foretrain.config.finetune.table import Table, known_keys

_SECTIONS = ("data", "training", "lora", "logging")
_ADAPTER = {"r", "lora_r", "lora_rank", "lora_alpha", "target_modules", "lora_target_modules", "lora_dropout"}
_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def read(table: Table, text: str) -> None:
    found = table.found
    sections = any(isinstance(table.keys.get(name), Mapping) for name in _SECTIONS)
    loads = sections or found.called  # what its command line and from_pretrained do by default
    if sections:
        table.keys = _flat(table.keys)
        found.values |= {"lora_r": 64, "batch_size": 2, "grad_accum": 4}
    found.values |= {"loop": "unsloth", "unsloth": True, "seq_len": 2048, "lora_targets": _TARGETS}
    found.values |= {"gradient_checkpointing": loads, "offload_checkpoints": loads}
    found.model = table.word("model_name", table.word("model")) or None
    preferences(table)
    training_arguments(table)
    table.put("batch_size", "batch_size")
    table.put("epochs", "num_epochs")
    table.put("seq_len", "max_seq_length", "max_length")
    table.put("packing", "packing")
    checkpointing(table, "use_gradient_checkpointing")
    table.put("dtype", "dtype", "torch_dtype")
    found.values.setdefault("amp", "auto")
    if table.take("loop") == "own":
        table.unplanned("loop", "own")
    full = table.flag("full_finetuning") or table.word("training_type", "lora") == "full"
    full = full or not (loads or _ADAPTER & table.keys.keys())
    four_bit = table.flag("load_in_4bit", default=loads) and not full and not table.flag("load_in_16bit")
    refuse_two_precisions(table, four_bit and "load_in_4bit" in table.keys, "load_in_8bit", "load_in_fp8")
    four_bit = four_bit and not any(table.keys.get(key) for key in ("load_in_8bit", "load_in_fp8"))
    key = next((key for key in ("full_finetuning", "training_type") if key in table.keys), "load_in_4bit")
    method_of(table, key, adapters=not full, four_bit=four_bit, dora=table.flag("use_dora"))
    adapter_keys(table)
    table.rest(known=known_keys("training", "adapter", "unsloth"))


def _flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in keys.items():
        flat |= {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


_KEYS = frozenset(("full_finetuning", "random_state", "use_gradient_checkpointing", "fast_inference", "max_lora_rank",
    "loftq_config", "load_in_16bit", "use_exact_model_name", "finetune_vision_layers", "finetune_language_layers",
    "finetune_attention_modules", "finetune_mlp_modules", "unsloth_tiled_mlp", "float8_kv_cache", "offload_embedding",
    "finetune_last_n_layers", "qat_scheme"))  # fmt: skip
_OF_SECTIONS = (
    "training_type train_on_completions format_type vision_all_linear use_loftq local_dataset enable_wandb "
    "enable_tensorboard tensorboard_dir log_frequency"
)


def _fits(table: Mapping[str, Any]) -> bool:
    """Its own word for checkpoints, or two keys of its command line within the sections."""
    inside = _flat({name: table[name] for name in _SECTIONS if isinstance(table.get(name), Mapping)})
    words = [
        part.get(key) for part in (table, inside) for key in ("use_gradient_checkpointing", "gradient_checkpointing")
    ]
    return "unsloth" in words or len(inside.keys() & _KEYS.union(_OF_SECTIONS.split())) >= 2


FORMAT = Format("unsloth", _KEYS, read, _fits)
