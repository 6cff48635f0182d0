"""TRL's config (its CLI and script arguments) and the recipes of alignment-handbook, which are TRL's.

Defaults: trl/trainer/sft_config.py, base_config.py and model_config.py of TRL 0.2x to 1.x.
"""

from foretrain.config.finetune.formats.format import (
    Format,
    adapter_keys,
    attention,
    method_of,
    precision,
    refuse_two_precisions,
    training_arguments,
)
from foretrain.config.finetune.formats.known_keys import known_keys
from foretrain.config.finetune.table import Table


def read(table: Table, text: str) -> None:
    """Settings of a TRL file."""
    found = table.found
    found.values |= {"loop": "trl", "gradient_checkpointing": True, "seq_len": 1024, "dtype": "float32"}
    found.model = table.word("model_name_or_path", table.word("model", table.word("model_name"))) or None
    training_arguments(table)
    if "amp" not in found.values or (table.keys.get("bf16") is None and not table.flag("fp16")):
        precision(table, bf16=not table.flag("fp16"), fp16=table.flag("fp16"))  # bf16 unless fp16 is asked for
    table.put("seq_len", "max_length", "max_seq_length")
    _packing(table)
    table.put("dtype", "dtype", "torch_dtype")
    attention(table, "attn_implementation")
    if table.flag("use_flash_attention_2"):
        table.give("attn", "flash_attention_2", "use_flash_attention_2")
    four_bit = table.flag("load_in_4bit")
    refuse_two_precisions(table, four_bit, "load_in_8bit")
    adapters = table.flag("use_peft")
    if four_bit and not adapters:
        table.unplanned("load_in_4bit", True)
    method_of(table, "use_peft", adapters=adapters, four_bit=four_bit, dora=table.flag("use_dora"))
    if adapters:
        found.values |= {"lora_dropout": 0.05}
        found.peft_targets = not any(table.keys.get(key) for key in ("lora_target_modules", "target_modules"))
    adapter_keys(table)
    table.put("double_quant", "use_bnb_nested_quant", "bnb_4bit_use_double_quant")
    if adapters and "double_quant" not in found.values:
        found.values["double_quant"] = False  # TRL's default
    if table.keys.get("loss_type") in ("nll", "chunked_nll"):
        table.take("loss_type")
    table.rest(*known_keys("training", "adapter", "trl"))


def _packing(table: Table) -> None:
    """Rows that TRL joins without padding; those that are cut of one stream ("wrapped") stay rows, as if not packed."""
    packs, strategy, joins = table.flag("packing"), table.word("packing_strategy", "bfd"), table.flag("padding_free")
    if joins and not packs:
        table.give("packing", True, "padding_free")
    elif packs and strategy == "wrapped" and not joins:
        table.give("packing", False, "packing_strategy")
    else:
        table.put("packing", "packing")


_KEYS = frozenset(("use_peft", "dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split",
    "dataset_test_split", "dataset_num_proc", "dataset_text_field", "max_length", "assistant_only_loss",
    "completion_only_loss", "use_bnb_nested_quant", "packing_strategy", "eval_packing", "padding_free", "beta",
    "max_prompt_length", "loss_type"))  # fmt: skip
FORMAT = Format("trl", _KEYS, read)
