"""axolotl's YAML. Defaults and names: src/axolotl/utils/schemas/ and utils/config/__init__.py (July 2026)."""

from foretrain.config.finetune.formats.format import (
    Format,
    attention,
    checkpointing,
    method_of,
    refuse_two_precisions,
    steps,
    targets,
    training,
)
from foretrain.config.finetune.formats.sharding import shards
from foretrain.config.finetune.table import KINDS, Table, known_keys
from foretrain.config.words import flag

_FLAGS = {"flash_attention": "flash_attention_2", "flash_attn": "flash_attention_2", "sdp_attention": "sdpa",
          "eager_attention": "eager"}  # fmt: skip
_PLUGINS = {
    "liger": "harmless", "swanlab": "harmless", "lm_eval": "harmless",
    "spectrum": "at_most", "grokfast": "at_least", "kd": "distillation",
}  # fmt: skip
# What is trained for, by keys that are true of one kind; of several the last one counts.
_TRAININGS = {
    "pretraining_dataset": "pretraining", "num_labels": "classification", "kd_trainer": "distillation",
    "reward_model": "reward", "process_reward_model": "reward", "trainer_cls": "unknown", "ebft": "unknown",
    "diffusion": "unknown",
}  # fmt: skip
_OTHER_ATTENTION = ("flex_attention", "xformers_attention", "sage_attention", "s2_attention")


def read(table: Table, text: str) -> None:
    found = table.found
    found.model = table.word("base_model") or None
    found.values |= {"loop": "axolotl", "seq_len": 512, "batch_size": 1, "epochs": 1.0, "optim": "adamw_torch_fused"}
    table.put("seq_len", "sequence_len")
    table.put("batch_size", "micro_batch_size")
    _accumulation(table)
    table.put("epochs", "num_epochs")
    steps(table)
    table.put("optim", "optimizer")
    table.put("max_grad_norm", "max_grad_norm")
    _checkpointing(table)
    _adapter(table)
    _precision(table)
    _attention(table)
    _samples(table)
    _liger(table)
    _evaluation(table)
    value = table.take("torch_compile")
    table.give("compile", value == "auto" or bool(flag(value)), "torch_compile")
    shards(table, fsdp=("fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type"))
    for key in ("gpu_count", "ray_num_workers"):
        table.cards(key)
    _training(table)
    table.rest(known=known_keys("training", "axolotl"))


def _accumulation(table: Table) -> None:
    total, micro = table.take("batch_size"), table.found.values["batch_size"]
    if not table.put("grad_accum", "gradient_accumulation_steps") and isinstance(total, int) and total >= micro:
        table.give("grad_accum", total // micro, "batch_size")


def _checkpointing(table: Table) -> None:
    checkpointing(table, "gradient_checkpointing")
    others = ("gradient_checkpointing_kwargs", "unfrozen_parameters", "rl")
    if table.found.values.get("gradient_checkpointing") and all(table.keys.get(key) is None for key in others):
        table.found.values["reentrant"] = True  # utils/config/__init__.py, normalize_config


def _adapter(table: Table) -> None:
    adapter = table.word("adapter")
    four_bit = table.flag("load_in_4bit")
    eight_bit = adapter and flag(table.keys.get("load_in_8bit"))
    refuse_two_precisions(table, four_bit or adapter == "qlora", "load_in_8bit", "fp8")
    if adapter not in ("", "lora", "qlora"):
        table.unplanned("adapter", adapter, "lora")
    if not adapter:
        table.take("load_in_8bit")
        if four_bit:
            table.unplanned("load_in_4bit", True)
    if eight_bit:
        table.put("load_in_8bit", "load_in_8bit")
    if adapter == "qlora" and flag(table.keys.get("load_in_4bit")) is False:
        table.unplanned("load_in_4bit", False)  # axolotl refuses it
    four_bit = adapter == "qlora" or bool(adapter and four_bit)
    method_of(table, "adapter", adapters=bool(adapter), four_bit=four_bit, dora=table.flag("peft_use_dora"))
    table.put("lora_r", "lora_r")
    table.put("lora_dropout", "lora_dropout")
    table.put("lora_saved", "lora_modules_to_save")
    if not table.flag("lora_target_linear"):
        targets(table, "lora_target_modules")
    else:
        table.take("lora_target_modules")
        table.give("lora_targets", "all-linear", "lora_target_linear")
    inside = table.table("bnb_config_kwargs")
    inside.put("double_quant", "bnb_4bit_use_double_quant")
    inside.rest(("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "load_in_4bit"))


def _precision(table: Table) -> None:
    """bf16: true, "auto" (a card that has bfloat16 is planned) or "full"; bfloat16 and float16: no autocast."""
    bf16, fp16 = table.take("bf16", "auto"), table.flag("fp16")
    halves = {"bfloat16": table.flag("bfloat16"), "float16": table.flag("float16")}
    on = bf16 in ("auto", "full") or bool(flag(bf16))
    if bf16 == "auto" and (fp16 or any(halves.values())):
        on = False
    table.give("amp", "bf16" if on else "fp16" if fp16 else "no", "bf16" if on or not fp16 else "fp16")
    half = next((name for name, is_on in halves.items() if is_on), None)
    table.give("dtype", "bfloat16" if on else "float16" if fp16 else half or "float32", half or "bf16")
    if bf16 == "full":
        table.unplanned("bf16", "full", bound="at_most")
    table.take("torch_dtype")


def _attention(table: Table) -> None:
    attention(table, "attn_implementation")
    for key, name in _FLAGS.items():
        if table.flag(key):
            table.give("attn", name, key)
    for key in _OTHER_ATTENTION:
        if table.flag(key):
            table.unplanned(key, True)


def _samples(table: Table) -> None:
    """Take packed samples, or padded ones with a mask. A processor means pictures or sounds, which are not planned."""
    if table.take("processor_type"):
        table.unplanned("processor_type", table.keys["processor_type"], bound="at_least")
    table.put("packing", "sample_packing")
    table.take("eval_sample_packing")
    if table.flag("pad_to_sequence_len") and not table.found.values.get("packing"):
        table.give("padded", True, "pad_to_sequence_len")


def _liger(table: Table) -> None:
    """Liger's kernels: on where its plugin is, or one of its keys; those that are off are named."""
    plugins = table.take("plugins", [])
    keys = [key for key in table.keys if key.startswith("liger_")]
    on = [key for key in keys if table.flag(key)]
    for plugin in plugins if isinstance(plugins, list) else []:
        if not isinstance(plugin, str):
            continue
        kind = next((kind for part, kind in _PLUGINS.items() if part in plugin.lower().split(".")), "decisive")
        if "cut_cross_entropy" in plugin.lower().split("."):
            if flag(table.take("cut_cross_entropy", True)):
                table.give("cut_cross_entropy", True, "plugins")
        elif kind == "distillation":
            table.give("training", kind, "plugins")
        elif kind != "harmless":
            table.unplanned("plugins", plugin.split(".")[-1], bound=KINDS.get(kind, "unknown"))
    if on:
        table.give("liger", True, on[0])
        for key in ("liger_fused_linear_cross_entropy", "liger_rms_norm", "liger_glu_activation"):
            if key not in on and not (key == "liger_glu_activation" and "liger_swiglu" in on):
                table.unplanned(key, False, bound="at_least")


def _evaluation(table: Table) -> None:
    share = table.take("val_set_size", 0)
    data = bool(table.keys.get("test_datasets")) or share not in (0, 0.0, "0", False)
    when = [table.take(key) for key in ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy")]
    table.give("evaluate", data and any(each not in (None, 0, "no", False) for each in when), "val_set_size")
    if not table.put("eval_batch_size", "eval_batch_size"):
        table.found.values["eval_batch_size"] = table.found.values["batch_size"]


def _training(table: Table) -> None:
    """What is trained for: rl, or a key that is true of a kind."""
    if (nodes := table.take("node_count")) not in (None, 0, 1):
        table.unplanned("node_count", nodes, bound="at_least")
    for key, kind in _TRAININGS.items():
        if table.take(key) not in (None, False, "", [], {}):
            table.give("training", kind, key)
    if (word := table.word("rl")) != "":
        training(table, word, "rl")


_KEYS = frozenset(("base_model", "micro_batch_size", "sequence_len", "adapter", "sample_packing", "val_set_size",
    "lora_target_linear", "pad_to_sequence_len", "dataset_prepared_path", "saves_per_epoch", "evals_per_epoch",
    "tokenizer_type", "flash_attention", "wandb_watch", "train_on_inputs", "eval_sample_packing", "base_model_config",
    "plugins", "chat_template_jinja", "datasets", "rl", "peft_use_dora", "lora_modules_to_save"))  # fmt: skip
FORMAT = Format("axolotl", _KEYS, read)
