"""TRL's config and the recipes of alignment-handbook, which are TRL's (trl/trainer/*_config.py of 0.2x to 1.x)."""

from foretrain.config.finetune.formats.format import (
    Format,
    adapter_keys,
    attention,
    method_of,
    precision,
    refuse_two_precisions,
    training,
    training_arguments,
)
from foretrain.config.finetune.options import PREFERENCES, PROMPT_LEN, RLOO
from foretrain.config.finetune.table import Table, known_keys


def read(table: Table, text: str) -> None:
    found = table.found
    found.values |= {"loop": "trl", "gradient_checkpointing": True, "seq_len": 1024, "dtype": "float32"}
    preferences(table)
    found.model = table.word("model_name_or_path", table.word("model", table.word("model_name"))) or None
    training_arguments(table)
    if "amp" not in found.values or (table.keys.get("bf16") is None and not table.flag("fp16")):
        precision(table, bf16=not table.flag("fp16"), fp16=table.flag("fp16"))  # bf16 unless fp16 is asked for
    if not generation(table):
        table.put("seq_len", "max_length", "max_seq_length")
    _packing(table)
    made = table.table("model_init_kwargs")
    for each in (made, table):
        each.put("dtype", "dtype", "torch_dtype")
        attention(each, "attn_implementation")
    made.rest(("device_map", "low_cpu_mem_usage", "revision", "token", "trust_remote_code", "use_cache"))
    if table.flag("use_flash_attention_2"):
        table.give("attn", "flash_attention_2", "use_flash_attention_2")
    four_bit = table.flag("load_in_4bit")
    refuse_two_precisions(table, four_bit, "load_in_8bit")
    adapters = table.flag("use_peft")
    if adapters:
        table.put("load_in_8bit", "load_in_8bit")
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
    table.rest(known=known_keys("training", "adapter", "trl"))


def preferences(table: Table) -> None:
    """What is trained for, by the keys that one of TRL's trainers alone has; what decides most comes first."""
    loss = table.keys.get("loss_type")
    losses = {each for each in (loss if isinstance(loss, list) else [loss]) if isinstance(each, str)}
    if "training" in table.keys:  # the class of a script's config
        training(table, table.take("training"), "training")
    else:
        given = {key for key, value in table.keys.items() if value is not None}
        found = next(((kind, keys & given) for kind, keys in _TRAININGS.items() if keys & given), None)
        if losses & {"simpo", "orpo", "kto", "bco", "dft"} and not (found and found[0] in ("grpo", "ppo")):
            word = next(iter(losses & {"simpo", "orpo", "kto", "bco", "dft"}))
            training(table, "sft" if word == "dft" else word, "loss_type")
        elif found is not None:
            kind = "dpo" if found[0] == "preference" and losses & _DPO else found[0]
            table.give("training", kind, min(found[1]))
        elif losses - {"nll", "chunked_nll"}:
            training(table, "dpo" if losses & _DPO else "unknown", "loss_type")
    if table.found.values.get("training") == "kto" and "apo_zero_unpaired" in losses:  # which has no KL divergence
        table.unplanned("loss_type", "apo_zero_unpaired", bound="at_most")
    if losses == {"simpo"} and table.found.values.get("training") in ("cpo", "simpo"):
        table.found.values["training"] = "cpo" if table.keys.get("cpo_alpha", 1.0) else "simpo"
    if losses != {"dft"}:
        table.take("loss_type")
    kind = PREFERENCES.get(table.found.values.get("training", ""))
    if kind and table.flag("disable_dropout", default=not kind.generates) == kind.generates:
        table.unplanned("disable_dropout", kind.generates, bound="at_most" if kind.generates else "at_least")
    if kind and (kind.reference or kind.generates) and table.flag("sync_ref_model"):
        table.unplanned("sync_ref_model", True, bound="at_least")
    if kind and kind.reference:
        table.put("precompute_reference", "precompute_ref_log_probs")


def generation(table: Table) -> bool:
    """Take how GRPO and RLOO generate; return whether they do. Prompts are as long as the data's since TRL 0.28."""
    values = table.found.values
    if values.get("training") not in ("grpo", "rloo"):
        return False
    length = [table.take(key, default) for key, default in (("max_prompt_length", PROMPT_LEN), (_LENGTH, 512))]
    if all(type(each) is int for each in length):
        table.give("completion_len", length[1], _LENGTH)
        table.give("seq_len", sum(length), _LENGTH)
    values |= RLOO if values["training"] == "rloo" else {}
    if table.keys.get("rloo_k") is not None:  # of TRL's trainer until 0.22, which had a value of its own
        table.unplanned("rloo_k", table.keys["rloo_k"], bound="at_least")
    for option in ("num_generations", "steps_per_generation", "num_iterations", "beta"):
        table.put(option, option)
    together, batch = table.take("generation_batch_size"), values.get("batch_size", 8)
    if type(together) is int and together % batch == 0 and table.found.cards <= 1:
        table.give("steps_per_generation", together // batch, "generation_batch_size")
    elif together is not None:
        table.unplanned("generation_batch_size", together)
    if table.flag("use_vllm"):
        key = "vllm_mode" if "vllm_mode" in table.keys else "use_vllm"
        table.give("vllm", table.word("vllm_mode", "colocate"), key)
        table.put("vllm_memory", "vllm_gpu_memory_utilization")
        table.put("vllm_sleep", "vllm_enable_sleep_mode")
        if not table.flag("vllm_importance_sampling_correction", default=True):
            table.unplanned("vllm_importance_sampling_correction", False, bound="at_most")
    return True


def _packing(table: Table) -> None:
    """Rows that TRL joins without padding; those that are cut of one stream ("wrapped") stay rows, as if not packed."""
    packs, strategy, joins = table.flag("packing"), table.word("packing_strategy", "bfd"), table.flag("padding_free")
    if joins and not packs:
        table.give("packing", True, "padding_free")
    elif packs and strategy == "wrapped" and not joins:
        table.give("packing", False, "packing_strategy")
    else:
        table.put("packing", "packing")


_LENGTH = "max_completion_length"
_DPO = frozenset(("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_pair", "aot_unpaired", "discopop", "apo_zero", "apo_down", "sigmoid_norm"))  # fmt: skip
_TRAININGS = {
    "grpo": {"num_generations", "reward_funcs", _LENGTH, "reward_weights", "num_iterations"},
    "rloo": {"rloo_k"}, "ppo": {"reward_model_path", "sft_model_path", "num_ppo_epochs", "value_model"},
    "kto": {"desirable_weight", "undesirable_weight"}, "simpo": {"simpo_gamma"},
    "distillation": {"teacher_model_name_or_path", "lmbda"},
    "reward": {"center_rewards_coefficient"},
    "cpo": {"cpo_alpha"},
    "preference": {"beta", "max_prompt_length", "precompute_ref_log_probs", "rpo_alpha", "ref_model_init_kwargs",
                   "orpo_alpha"},
}  # fmt: skip
_KEYS = frozenset(("use_peft", "dataset_mixture", "dataset_mixer", "dataset_train_split", "dataset_test_split",
    "dataset_text_field", "assistant_only_loss", "completion_only_loss", "use_bnb_nested_quant", "packing_strategy",
    "eval_packing", "chat_template_path", "lora_task_type", "dataset_name", "dataset_num_proc", "dataset_splits",
    "max_length", "loss_type", "beta", "use_vllm", *set().union(*_TRAININGS.values())))  # fmt: skip
FORMAT = Format("trl", _KEYS, read)
