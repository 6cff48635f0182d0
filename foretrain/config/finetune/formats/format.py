"""`Format`: one trainer's config file, and what several share; defaults and names are of each trainer's own code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.formats.sharding import shards
from foretrain.config.finetune.table import Table
from foretrain.config.words import flag


@dataclass(frozen=True)
class Format:
    """A trainer's config. `keys`: those that no other trainer has, two of which tell it; `fits`: what tells it alone;
    `read` takes the table; the text is there for what stands in comments."""

    name: str
    keys: frozenset[str]
    read: Callable[[Table, str], None]
    fits: Callable[[Mapping[str, Any]], bool] = field(default=lambda table: False)


def method_of(table: Table, key: str, *, adapters: bool, four_bit: bool, dora: bool) -> None:
    """Take full, lora, dora or qlora; what of these goes together and is not planned is named."""
    method = ("qlora" if four_bit else "dora" if dora else "lora") if adapters else "full"
    if adapters and four_bit and dora:
        table.unplanned(key, "DoRA over 4-bit weights", bound="at_least")
    table.give("method", method, key)


def training(table: Table, word: Any, key: str) -> None:
    """What is trained for; a word that is not known here is a training that nobody knows."""
    if not table.give("training", word, key):
        table.found.values["training"] = "unknown"


def refuse_two_precisions(table: Table, four_bit: bool, *others: str) -> None:
    """Raises UserError where weights shall be 4-bit and of another width at once."""
    for key in others:
        if four_bit and flag(table.keys.get(key)):
            raise UserError("config.finetune_two_widths", key=table.name(key), source=table.found.source)


def precision(table: Table, bf16: bool, fp16: bool) -> None:
    """Take autocast by the keys bf16 and fp16. Raises UserError where both are true."""
    if bf16 and fp16:
        raise UserError("config.finetune_bf16_fp16", source=table.found.source)
    table.give("amp", "bf16" if bf16 else "fp16" if fp16 else "no", "bf16" if bf16 or not fp16 else "fp16")


def attention(table: Table, *keys: str) -> None:
    """The attention implementation. Flash attention 3 and the hub's kernels are planned as 2, and named."""
    for key in keys:
        value = table.take(key)
        if not isinstance(value, str):
            continue
        flash = dict.fromkeys(("fa2", "flash", "flash_attn"), "flash_attention_2")  # flash_attn: ms-swift's
        word = {**flash, "auto": "sdpa", "disabled": "eager"}.get(value, value)
        if word not in ("sdpa", "eager", "flash_attention_2"):
            word = "flash_attention_2" if "flash" in word or word == "fa3" else "sdpa"
            table.unplanned(key, value, word)
        table.give("attn", word, key)


def checkpointing(table: Table, key: str, kwargs: str = "gradient_checkpointing_kwargs") -> None:
    """Take activation checkpointing; a word such as 'offload' means true, and is named, but for unsloth's."""
    value = table.take(key)
    if "offload_checkpoints" in table.found.values and value is not None:
        table.give("offload_checkpoints", value == "unsloth", key)
    if isinstance(value, str) and flag(value) is None:
        if value != "unsloth":
            table.unplanned(key, value, bound="at_most" if "offload" in value else "unknown")
        value = True
    if value is not None:
        table.give("gradient_checkpointing", value, key)
    inside = table.table(kwargs)
    inside.put("reentrant", "use_reentrant")
    inside.rest(harmless=("preserve_rng_state", "determinism_check"))


def steps(table: Table, key: str = "max_steps") -> None:
    """A number of optimizer steps; -1 and 0 mean as many as the epochs need."""
    value = table.take(key)
    if value is not None:
        table.give("max_steps", 0 if value in (-1, "-1") else value, key)


def training_arguments(table: Table) -> None:
    table.put("batch_size", "per_device_train_batch_size", "per_gpu_train_batch_size")
    table.put("grad_accum", "gradient_accumulation_steps")
    checkpointing(table, "gradient_checkpointing")
    checkpointing(table, "activation_checkpointing", "activation_checkpointing_kwargs")
    table.put("optim", "optim")
    if flag(table.take("adafactor")):
        table.give("optim", "adafactor", "adafactor")
    table.put("max_grad_norm", "max_grad_norm")
    table.put("compile", "torch_compile")
    table.put("liger", "use_liger_kernel")
    table.put("eval_batch_size", "per_device_eval_batch_size", "per_gpu_eval_batch_size")
    table.put("eval_accumulation_steps", "eval_accumulation_steps")
    table.put("epochs", "num_train_epochs")
    steps(table)
    if table.keys.get("bf16") is not None or table.keys.get("fp16") is not None:
        precision(table, table.flag("bf16"), table.flag("fp16"))
    evaluation(table)
    shards(table)


def evaluation(table: Table) -> None:
    """Whether the run evaluates: eval_strategy, its older name, or do_eval."""
    strategy = table.take("eval_strategy", table.take("evaluation_strategy"))
    asked = table.flag("do_eval")
    if strategy is not None:
        on = strategy not in (False, "no", "off", "none")
        table.give("evaluate", on, "eval_strategy" if "eval_strategy" in table.keys else "evaluation_strategy")
    elif "do_eval" in table.keys:
        table.give("evaluate", asked, "do_eval")
    table.put("keeps_logits", "keeps_logits")
    if table.flag("batch_eval_metrics") or table.flag("prediction_loss_only"):
        table.give("keeps_logits", False, "prediction_loss_only")


def adapter_keys(table: Table) -> None:
    """Rank, targets and dropout by the names of peft that TRL and others take."""
    table.put("lora_r", "lora_r", "lora_rank", "r")
    targets(table, "lora_target_modules", "target_modules", "lora_targets")
    table.put("lora_dropout", "lora_dropout")
    table.put("lora_saved", "lora_modules_to_save", "modules_to_save")
    table.put("merge", "merge")


def targets(table: Table, *keys: str) -> None:
    """The modules that get an adapter: 'all' and 'all-linear' are the same."""
    for key in keys:
        value = table.take(key)
        if value is not None:
            words = [value] if isinstance(value, str) else value
            every = words in (["all"], ["all-linear"], ["all_linear"])
            table.give("lora_targets", "all-linear" if every else value, key)
