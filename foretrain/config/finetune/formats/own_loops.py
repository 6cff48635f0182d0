"""Trainers with a loop of their own, planned as the nearest loop, each read by its rows in keys.toml (August 2026):
litgpt, nemo_automodel, mlx_lm, llmfoundry, swift, open_instruct."""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.formats.format import Format, attention, checkpointing, method_of, targets, training
from foretrain.config.finetune.formats.sharding import shards
from foretrain.config.finetune.table import Table, known_keys, rows_of
from foretrain.config.words import flag

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_OWNERS = {  # of the repositories that litgpt names without them
    "pythia": "EleutherAI", "llama": "meta-llama", "codellama": "codellama", "qwen": "Qwen", "gemma": "google",
    "mistral": "mistralai", "mixtral": "mistralai", "phi": "microsoft", "falcon": "tiiuae", "smollm": "HuggingFaceTB",
    "olmo": "allenai", "tinyllama": "TinyLlama", "danube": "h2oai", "stable": "stabilityai",
}  # fmt: skip
_ADAPTED = {  # litgpt's switches, and whether they are on where the file does not say
    "lora_query": ("q_proj", True), "lora_key": ("k_proj", False), "lora_value": ("v_proj", True),
    "lora_projection": ("o_proj", False), "lora_mlp": ("gate_proj,up_proj,down_proj", False),
    "lora_head": ("lm_head", False),
}  # fmt: skip
_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16", "amp_bf16": "bf16", "amp_fp16": "fp16"}
_DTYPES = {"bf16-true": "bfloat16", "16-true": "float16"}


def flattened(keys: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """The keys of all tables beside one another, with the tables that they are in: `train.micro_batch_size`."""
    flat: dict[str, Any] = {}
    for key, value in keys.items():
        deeper = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{inside}{key}.") if deeper else {f"{inside}{key}": value}
    return flat


def _read(name: str, given: Table, text: str) -> None:
    row, found, flat = rows_of("own")[name], given.found, flattened(given.keys)
    for key, value in flat.items():
        named = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        flat[key] = flat.get(named[1]) if named else None if value == "None" else value
    table = Table(flat, found)
    models = [value for key in row["model"].split() if isinstance(value := table.take(key), str)]
    found.model = models[0].removeprefix("checkpoints/") if models else None
    adapters = any(key.startswith(tuple(row["adapters"].split())) for key in flat)
    found.values |= row["defaults"]
    for option, keys in row["options"].items():
        table.put(option, *keys.split())
    _TRAINERS[name](table, adapters)
    total, micro = table.take(row.get("total", "")), found.values["batch_size"]
    if type(total) is int and total > 0:
        table.give("grad_accum", max(1, total // (micro * max(1, found.cards))), row["total"])
    if "bound" in row:
        table.unplanned("loop", name, bound=row["bound"])
    known = known_keys("training", "adapter")
    for kind in ("decisive", "harmless"):
        tables = tuple(f"{each}." for each in row.get(kind, "").split())
        known |= {key: kind for key in flat if f"{key}.".startswith(tables)}
    table.rest(known=known)


def _litgpt(table: Table, adapters: bool) -> None:
    found, kind = table.found, table.word("quantize")
    if found.model and "/" not in found.model:
        owner = next((owner for start, owner in _OWNERS.items() if found.model.lower().startswith(start)), "")
        found.model = f"{owner}/{found.model}".strip("/")
    four_bit = adapters and "4" in kind
    if kind and not four_bit:
        table.unplanned("quantize", kind)
    key = "quantize" if four_bit else "lora_r"
    method_of(table, key, adapters=adapters, four_bit=four_bit, dora=False)
    if adapters:
        names = [names for key, (names, on) in _ADAPTED.items() if table.flag(key, on)]
        table.give("lora_targets", ",".join(names), "lora_query")
    elif "model_name" in table.keys:
        table.give("training", "pretraining", "model_name")
        table.give("compile", True, "model_name")
    if four_bit:
        found.values |= {"double_quant": "dq" in kind, "optim": "paged_adamw_32bit"}
    _precision(table, "bf16-true")
    table.cards("devices")


def _precision(table: Table, default: str) -> None:
    word = table.word("precision", default)
    table.give("amp", _PRECISIONS.get(word, "no"), "precision")
    table.give("dtype", _DTYPES.get(word, "float32"), "precision")


def _automodel(table: Table, adapters: bool) -> None:
    four_bit = adapters and table.flag("quantization.load_in_4bit")
    method_of(table, "peft.dim", adapters=adapters, four_bit=four_bit, dora=table.flag("peft.use_dora"))
    if adapters and not table.flag("peft.match_all_linear"):
        targets(table, "peft.target_modules")
    checkpointing(table, "distributed.activation_checkpointing")
    recipe = table.word("recipe")
    if "NextTokenPrediction" not in recipe and "VLM" not in recipe:
        training(table, "unknown", "recipe")
    elif "Distillation" in recipe:
        training(table, "distillation", "recipe")
    elif "from_config" in table.word("model._target_"):
        table.give("training", "pretraining", "model._target_")
    if "VLM" in recipe:
        table.unplanned("recipe", recipe, bound="at_least")
    if "MaskedCrossEntropy" in table.word("loss_fn._target_", "MaskedCrossEntropy"):
        table.taken.update(key for key in table.keys if key.startswith("loss_fn."))
    else:
        table.unplanned("loss_fn._target_", table.keys["loss_fn._target_"])
    if table.keys.get("packed_sequence.packed_sequence_size"):
        table.put("seq_len", "packed_sequence.packed_sequence_size")
        table.give("packing", True, "packed_sequence.packed_sequence_size")


def _foundry(table: Table, adapters: bool) -> None:
    if table.word("model.name") == "mpt_causal_lm":
        table.give("training", "pretraining", "model.name")
    method_of(table, "model.peft_config.r", adapters=adapters, four_bit=False, dora=False)
    _precision(table, "amp_bf16")
    time = re.fullmatch(r"(\d+)(ep|ba)", str(table.take("max_duration")))
    if time:
        table.give("epochs" if time[2] == "ep" else "max_steps", int(time[1]), "max_duration")


def _mlx(table: Table, adapters: bool) -> None:
    kind = table.word("fine_tune_type", "lora")
    method_of(table, "fine_tune_type", adapters=kind != "full", four_bit=False, dora=kind == "dora")


def _swift(table: Table, adapters: bool) -> None:
    key = next((key for key in ("train_type", "tuner_type") if key in table.keys), "train_type")
    kind, bits = table.word(key, "lora"), str(table.take("quant_bits", table.take("quantization_bit", "")))
    four_bit = bits == "4" and table.word("quant_method", "bnb") == "bnb"
    if bits and not four_bit:
        table.unplanned("quant_bits", bits)
    if kind not in ("full", "lora"):
        table.unplanned(key, kind, "lora")
    method_of(table, key, adapters=kind != "full", four_bit=kind != "full" and four_bit, dora=table.flag("use_dora"))
    targets(table, "target_modules")
    word = table.word("rlhf_type", table.word("task_type", "sft")).lower()
    if word not in ("sft", "causal_lm"):
        training(table, word, "rlhf_type" if "rlhf_type" in table.keys else "task_type")
    elif flag(table.take("use_logits_to_keep")) is not False:
        table.unplanned("use_logits_to_keep", True, bound="at_most")  # logits of what has a label alone
    half = {"bfloat16": "bf16", "float16": "fp16"}
    table.give("amp", half.get(str(table.found.values["dtype"]), "no"), "torch_dtype")
    attention(table, "attn_impl")
    for key in ("freeze_vit", "freeze_aligner", "vit_gradient_checkpointing"):  # its model sees pictures
        if key in table.keys:
            table.unplanned(key, bound="at_least")
    shards(table)


def _instruct(table: Table, adapters: bool) -> None:
    lora = table.flag("use_lora")
    method_of(table, "use_lora", adapters=lora, four_bit=lora and table.flag("use_qlora"), dora=False)
    if table.found.values.get("liger"):
        table.found.values["dtype"] = "float32"
    if table.take("beta", table.take("loss_type")) is not None:
        table.give("training", "dpo", "beta")


_TRAINERS: dict[str, Callable[[Table, bool], None]] = {
    "litgpt": _litgpt, "nemo-automodel": _automodel, "llm-foundry": _foundry, "mlx-lm": _mlx, "ms-swift": _swift,
    "open-instruct": _instruct,
}  # fmt: skip


def _tells(row: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
    flat = flattened(keys).keys()
    return any({*each.split()} <= flat for each in row["tells"].split(" or "))


def refuse(keys: Mapping[str, Any], source: str) -> None:
    """Raises UserError for a file whose run a command plans, with that command."""
    flat = flattened(keys)
    for trainer, row in rows_of("words").items():
        if _tells(row, keys):
            pairs = [(each.partition("=")[0], flat.get(each.rpartition("=")[2])) for each in row["words"].split()]
            words = [f"--{name}={value}" for name, value in pairs if isinstance(value, int | float | str)]
            command = shlex.join(["foretrain", "plan", *row.get("always", "").split(), *words])
            raise UserError("config.finetune_foreign", path=source, trainer=trainer, command=command)


FORMATS = tuple(
    Format(name, frozenset(), partial(_read, name), partial(_tells, row)) for name, row in rows_of("own").items()
)
