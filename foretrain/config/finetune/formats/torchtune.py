"""torchtune's YAML: components named by _component_, which are read and never instantiated. The recipe stands in a
comment: `tune run [--nproc_per_node N] RECIPE`. Names: recipes/ and torchtune/models/ (April 2026)."""

import re
from collections.abc import Mapping
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.formats.format import Format, method_of, training
from foretrain.config.finetune.table import Table, known_keys

_RUN = re.compile(r"tune run (?:--?nnodes \d+ )?(?:--nproc[_-]per[_-]node[ =](\d+) )?(?:--?nnodes \d+ )?(\w+)")
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_OPTIM = {
    "torch.optim.AdamW": "adamw_torch", "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit", "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "torch.optim.SGD": "sgd", "torch.optim.Muon": "muon",
}  # fmt: skip
_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "down_proj", "up_proj")  # w1, w2, w3
# torchtune's builders by the presets' names, or by the repositories that its configs download.
_MODELS = {
    "llama2_7b": "llama-2-7b", "llama3_1_8b": "llama-3.1-8b", "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_2_1b": "llama-3.2-1b", "llama3_2_3b": "llama-3.2-3b", "llama3_3_70b": "llama-3.3-70b",
    "mistral_7b": "mistral-7b-v0.1", "phi4_14b": "phi-4", "qwen2_5_0_5b": "qwen2.5-0.5b",
    "qwen2_5_1_5b": "qwen2.5-1.5b", "qwen2_5_3b": "qwen2.5-3b", "qwen2_5_7b": "qwen2.5-7b",
    "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b", "qwen3_8b": "qwen3-8b",
    "qwen3_14b": "qwen3-14b", "qwen3_32b": "qwen3-32b", "llama3_8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B-Instruct", "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf", "llama3_1_405b": "meta-llama/Meta-Llama-3.1-405B-Instruct",
    "gemma_2b": "google/gemma-2b", "gemma_7b": "google/gemma-7b", "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b", "gemma2_27b": "google/gemma-2-27b",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct", "qwen2_0_5b": "Qwen/Qwen2-0.5B-Instruct",
    "qwen2_1_5b": "Qwen/Qwen2-1.5B-Instruct", "qwen2_7b": "Qwen/Qwen2-7B-Instruct",
    "qwen2_5_14b": "Qwen/Qwen2.5-14B-Instruct", "qwen2_5_32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2_5_72b": "Qwen/Qwen2.5-72B-Instruct",
}  # fmt: skip
_OWN_SIZES = ("decoder_trainable", "encoder_trainable", "fusion_trainable", "vocab_size", "num_layers", "num_heads",
              "num_kv_heads", "embed_dim", "intermediate_dim", "attn_dropout", "norm_eps")  # fmt: skip
_NOT_TRAINING = ("tasks", "prompt")
# What a recipe is for, by its name, its loss, or a key that such a recipe alone has.
_TRAININGS = {
    r"dpo|rsoloss": "dpo", r"grpo": "grpo", r"ppo": "ppo", r"simpo": "simpo", r"kto": "kto",
    r"\bkd_|_kd\b|distillation|teacher": "distillation", r"reward": "reward",
}  # fmt: skip


def read(table: Table, text: str) -> None:
    found, keys = table.found, table.keys
    if "optimizer" not in keys and ("quantizer" in keys or any(key in keys for key in _NOT_TRAINING)):
        key = next(key for key in (*_NOT_TRAINING, "quantizer") if key in keys)
        raise UserError("config.finetune_not_training", path=found.source, key=key)
    found.values |= {"loop": "torchtune", "amp": "no", "max_grad_norm": 0.0}
    for name in ("batch_size", "compile"):
        table.put(name, name)
    table.put("grad_accum", "gradient_accumulation_steps")
    table.put("epochs", "epochs")
    table.put("gradient_checkpointing", "enable_activation_checkpointing")
    table.put("max_grad_norm", "clip_grad_norm")
    table.put("dtype", "dtype")
    _model(table)
    _optimizer(table)
    tokenizer = table.table("tokenizer")
    length = _resolved(tokenizer.take("max_seq_len", keys.get("max_seq_len")), keys)
    if length is not None:
        tokenizer.give("seq_len", length, "max_seq_len")
    data = table.take("dataset")
    parts = data if isinstance(data, list) else [data]
    packed = [each.get("packed") for each in parts if isinstance(each, Mapping) and "packed" in each]
    packed = [_resolved(each, keys) for each in packed] or [keys.get("packed")]
    table.give("packing", any(packed), "dataset.packed")
    if "dataset_val" in keys and keys.get("run_val_every_n_steps"):
        table.give("evaluate", True, "run_val_every_n_steps")
        table.put("eval_batch_size", "batch_size_val")
    _recipe(table, text)
    table.rest(known=known_keys("torchtune"))


def _resolved(value: Any, keys: Mapping[str, Any]) -> Any:
    """A value, or that of the key that ${key} names."""
    named = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return keys.get(named[1]) if named else value


def _model(table: Table) -> None:
    model = table.table("model")
    builder = model.word("_component_").rpartition(".")[2]
    bare = re.sub(r"^q?lora_", "", builder)
    table.found.model = _MODELS.get(re.sub(r"_(instruct|base)$", "", bare), bare or None)
    adapters = builder != bare
    four_bit = builder.startswith("qlora_") or model.flag("quantize_base")
    method_of(model, "_component_", adapters=adapters, four_bit=adapters and four_bit, dora=model.flag("use_dora"))
    if not adapters:
        model.rest(("image_size", "max_seq_len"), _OWN_SIZES)
        return
    table.found.values["lora_r"] = 8  # the builders' default
    model.put("lora_r", "lora_rank")
    model.put("lora_dropout", "lora_dropout")
    named = model.take("lora_attn_modules", [])
    modules = [_MODULES.get(each, each) for each in named] if isinstance(named, list) else named
    if isinstance(modules, list):
        modules += [*_MLP] if model.flag("apply_lora_to_mlp") else []
        modules += ["lm_head"] if model.flag("apply_lora_to_output") else []
    model.give("lora_targets", modules, "lora_attn_modules")
    model.rest(("lora_alpha", "image_size", "max_seq_len"), ("quantize_base", *_OWN_SIZES))


def _optimizer(table: Table) -> None:
    optimizer = table.table("optimizer")
    name = optimizer.word("_component_")
    fused = optimizer.flag("fused")
    if name in _OPTIM:
        optimizer.give("optim", "adamw_torch_fused" if fused and "torch" in name else _OPTIM[name], "_component_")
    elif name:
        optimizer.unplanned("_component_", name)
    optimizer.rest(("lr", "weight_decay", "betas", "eps", "momentum", "foreach"))


def _recipe(table: Table, text: str) -> None:
    """The recipe and how many processes it wants, by the comment that every config has."""
    run = _RUN.search(text)
    recipe = run[2] if run else ""
    if run and "distributed" in recipe:
        table.found.sharding = "fsdp"
        table.found.cards = int(run[1]) if run[1] and int(run[1]) > 1 else 0
        table.found.cards_key = "nproc_per_node"
        table.unplanned("recipe", recipe)
    loss = table.keys.get("loss")
    named = f"{recipe} {loss.get('_component_', '')} {' '.join(table.keys)}" if isinstance(loss, Mapping) else recipe
    kind = next((kind for sign, kind in _TRAININGS.items() if re.search(sign, named, re.IGNORECASE)), "")
    if kind:
        table.give("training", kind, "recipe")
    elif run and not re.match(r"(full|lora|qat|qat_lora)_(finetune|single|distributed)", recipe):
        training(table, "unknown", "recipe")
    if "qat" in recipe:
        table.unplanned("recipe", recipe, bound="at_least")


def _fits(table: Mapping[str, Any]) -> bool:
    """Components are named so in no other trainer's file."""
    return any(isinstance(value, Mapping) and "_component_" in value for value in table.values())


_KEYS = frozenset(("checkpointer", "tokenizer", "metric_logger", "profiler", "enable_activation_checkpointing",
    "clip_grad_norm", "optimizer_in_bwd", "max_steps_per_epoch"))  # fmt: skip
FORMAT = Format("torchtune", _KEYS, read, _fits)
