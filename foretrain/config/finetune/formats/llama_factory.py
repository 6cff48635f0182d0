"""LLaMA-Factory's YAML and JSON, and that of its version 1 (examples/v1), whose names differ. Defaults:
src/llamafactory/hparams/ and v1/config/; trainable weights are float32 unless pure_bf16 (model/adapter.py)."""

from foretrain.base.errors import UserError
from foretrain.config.finetune.formats.format import (
    Format,
    attention,
    method_of,
    refuse_two_precisions,
    targets,
    training,
    training_arguments,
)
from foretrain.config.finetune.table import Table, known_keys

_NOT_TRAINING = ("export_dir", "infer_backend")


def read(table: Table, text: str) -> None:
    found = table.found
    trains = table.flag("do_train") or bool({"learning_rate", "per_device_train_batch_size"} & table.keys.keys())
    if not table.flag("do_train") and (key := next((k for k in ("do_predict", "do_eval") if table.flag(k)), None)):
        raise UserError("config.finetune_not_training", path=found.source, key=key)
    if not trains and any(key in table.keys for key in (*_NOT_TRAINING, "tokenized_path")):
        key = next(key for key in (*_NOT_TRAINING, "tokenized_path") if key in table.keys)
        raise UserError("config.finetune_not_training", path=found.source, key=key)
    found.model = table.word("model_name_or_path") or None
    found.values |= {"loop": "llama-factory", "seq_len": 2048, "gradient_checkpointing": True, "reentrant": True}
    training_arguments(table)
    table.put("seq_len", "cutoff_len")
    stage = table.word("stage", "sft")
    preference = table.word("pref_loss")
    training(table, preference if stage == "dpo" and preference in ("orpo", "simpo") else stage, "stage")
    table.give("packing", table.flag("packing", default=stage == "pt") or table.flag("neat_packing"), "packing")
    table.taken.discard("neat_packing")
    if table.flag("disable_gradient_checkpointing"):
        table.give("gradient_checkpointing", False, "disable_gradient_checkpointing")
    table.put("reentrant", "use_reentrant_gc")
    table.put("liger", "enable_liger_kernel")
    if table.flag("use_unsloth"):  # model/model_utils/unsloth.py
        table.give("unsloth", True, "use_unsloth")
        table.give("offload_checkpoints", True, "use_unsloth")
    attention(table, "flash_attn")
    if table.flag("use_muon"):
        table.give("optim", "muon", "use_muon")
    _adapter(table)
    evaluates = table.take("val_size", 0) not in (0, 0.0) or "eval_dataset" in table.keys
    if not evaluates:
        found.values.pop("evaluate", None)
        found.origins.pop("evaluate", None)
    table.cards("ray_num_workers")
    table.rest(known=known_keys("training", "llama-factory"))


def _adapter(table: Table) -> None:
    kind = table.word("finetuning_type", "lora")
    bits = table.take("quantization_bit")
    how = table.word("quantization_method", "bnb")
    four_bit = str(bits) == "4" and how in ("bnb", "bitsandbytes")
    eight_bit = str(bits) == "8" and how in ("bnb", "bitsandbytes") and kind != "full"
    if eight_bit:
        table.give("load_in_8bit", True, "quantization_bit")
    if bits is not None and not four_bit and not eight_bit:
        table.unplanned("quantization_bit", bits)
        if how not in ("bnb", "bitsandbytes"):
            table.unplanned("quantization_method", how)
    refuse_two_precisions(table, four_bit, "fp8")
    pure = table.flag("pure_bf16")
    if kind not in ("lora", "full"):
        table.unplanned("finetuning_type", kind, "lora")
    if kind == "full" and bits is not None:
        table.unplanned("finetuning_type", "full, over quantized weights")
    adapters = kind != "full"
    table.found.values["lora_r"] = 8
    method_of(table, "finetuning_type", adapters=adapters, four_bit=four_bit, dora=table.flag("use_dora"))
    table.put("lora_r", "lora_rank")
    targets(table, "lora_target")
    table.put("lora_dropout", "lora_dropout")
    table.put("lora_saved", "additional_target")
    table.put("double_quant", "double_quantization")
    amp = table.found.values.get("amp", "no")
    half = "bfloat16" if amp == "bf16" or pure else "float16" if amp == "fp16" else "auto"
    key = "pure_bf16" if pure else "bf16" if amp == "bf16" else "fp16"
    table.give("dtype", "float32" if not adapters and not pure else half, key)


def read_v1(table: Table, text: str) -> None:
    found = table.found
    found.model = table.word("model") or None
    found.values |= {"loop": "llama-factory", "seq_len": 2048, "batch_size": 1, "gradient_checkpointing": True}
    table.put("seq_len", "cutoff_len")
    table.put("batch_size", "micro_batch_size")
    table.put("epochs", "num_train_epochs")
    table.put("max_steps", "max_steps")
    table.put("max_grad_norm", "max_grad_norm")
    table.put("gradient_checkpointing", "enable_activation_checkpointing")
    attention(table, "flash_attn")
    total = table.take("global_batch_size")
    if isinstance(total, int) and total >= found.values["batch_size"]:
        table.give("grad_accum", total // found.values["batch_size"], "global_batch_size")
    if table.word("model_class", "llm") != "llm":
        table.unplanned("model_class", table.keys["model_class"])
    _plugins(table)
    strategy = table.word("batching_strategy", "normal")
    if "pack" in strategy:
        table.give("packing", True, "batching_strategy")
    elif strategy not in ("normal", "padding_free"):
        table.unplanned("batching_strategy", strategy)
    table.rest(known=known_keys("llama-factory-v1"))


def _plugins(table: Table) -> None:
    peft, quant = table.table("peft_config"), table.table("quant_config")
    kind, bits = peft.word("name"), quant.take("quantization_bit")
    if kind not in ("", "lora"):
        peft.unplanned("name", kind)
    four_bit = str(bits) == "4"
    if bits is not None and not four_bit:
        quant.unplanned("quantization_bit", bits)
    quant.take("name")
    if kind == "lora":
        table.found.values["lora_r"] = 8
    method_of(table, "peft_config", adapters=kind == "lora", four_bit=four_bit, dora=peft.flag("use_dora"))
    peft.put("lora_r", "r")
    targets(peft, "target_modules")
    peft.put("lora_dropout", "lora_dropout")
    peft.put("lora_saved", "modules_to_save")
    peft.rest(("lora_alpha", "use_rslora", "init_lora_weights", "bias", "task_type", "export_dir", "export_size",
               "infer_dtype", "adapter_name_or_path"), ("freeze_trainable_layers", "freeze_trainable_modules",
               "freeze_extra_modules", "cast_trainable_params_to_fp32"))  # fmt: skip
    quant.put("double_quant", "double_quantization")
    quant.rest(("compute_dtype", "quantization_type", "quant_type"))
    dist = table.table("dist_config")
    if dist.keys:
        name = dist.word("name")
        table.found.sharding = "deepspeed" if "deepspeed" in name else "fsdp"
        table.unplanned("dist_config", name)
    optim = table.table("optim_config")
    optim.put("optim", "name")
    optim.rest(("weight_decay", "wd", "betas", "eps", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"))


_KEYS = frozenset(("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_target",
    "plot_loss", "quantization_bit", "pure_bf16", "export_dir", "infer_backend", "quantization_method", "neat_packing",
    "pref_beta", "pref_loss", "additional_target", "tokenized_path", "enable_liger_kernel", "use_unsloth",
    "disable_gradient_checkpointing", "upcast_layernorm"))  # fmt: skip


FORMAT = Format("llama-factory", _KEYS, read)
_V1_KEYS = frozenset(("model_class", "peft_config", "quant_config", "dist_config", "kernel_config", "init_config",
    "optim_config", "cutoff_len", "template", "train_dataset", "sample_backend", "batching_strategy"))  # fmt: skip


FORMAT_V1 = Format("llama-factory-v1", _V1_KEYS, read_v1)
