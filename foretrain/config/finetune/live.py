"""A Trainer that is about to train, read as a model and a `FineTune`: from plain values, without torch."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from foretrain.base.errors import UserError
from foretrain.config.finetune.formats.format import method_of, training_arguments
from foretrain.config.finetune.formats.trl import preferences
from foretrain.config.finetune.options import PREFERENCES, Bound, FineTune
from foretrain.config.finetune.table import FileSettings, Table
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.source import facts_of

IN_A_LAYER = re.compile(r"(\D*?)\.?(\d+)\.(.+)")  # a path: what comes before the first number, that, and the rest


def put_adapter(table: Table, facts: ModelFacts | None, *, four_bit: bool) -> None:
    """Put the adapter into the table's settings. Raises UserError for an adapter other than LoRA."""
    kind = str(table.take("peft_type", "")).rpartition(".")[2].upper()
    if kind != "LORA":
        raise UserError("usage.callback_adapter", kind=kind or "an adapter without a name")
    modules = table.take("target_modules")
    if isinstance(modules, str) and modules != "all-linear":
        raise UserError("usage.callback_adapter", kind="target_modules as a pattern")
    method_of(table, "use_dora", adapters=True, four_bit=four_bit, dora=table.flag("use_dora"))
    table.put("lora_r", "r")
    table.put("lora_dropout", "lora_dropout")
    for option, key, value in (
        ("lora_targets", "target_modules", modules),
        ("lora_saved", "modules_to_save", table.take("modules_to_save")),
    ):
        names = value
        if value and not isinstance(value, str):
            names = sorted(of_all_layers(value, facts.n_layer) if facts else value)
        if names:
            table.give(option, names, key)


def of_all_layers(paths: Collection[str], layers: int) -> set[str]:
    """Names of modules; those that every layer has, without the layer: peft keeps fewer than 20 modules by their whole
    paths (`model.layers.0.self_attn.q_proj`), and more by their common ends. What only some layers have stays."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    matches = {path: found for path in paths if (found := IN_A_LAYER.fullmatch(path))}
    for found in matches.values():
        numbers[found[1], found[3]].add(int(found[2]))
    whole = {path: found for path, found in matches.items() if numbers[found[1], found[3]] == set(range(layers))}
    return {whole[path][3] if path in whole else path for path in paths}


WHERE = "TrainingArguments"
# TRL's trainers that are planned, but for those that generate, and what each is for.
TRAINER_OF = {f"{kind.trainer}Trainer": name for name, kind in PREFERENCES.items() if not kind.generates}
PLANNED = {"": "sft", "SFTTrainer": "sft", **TRAINER_OF}
# Of TrainingArguments, what a plan does not have and a comparison of runs asks for.
LEARNING = ("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "seed")


@dataclass(frozen=True)
class LiveRun:
    """What is known of a run. `adapter`: peft's config, if any; `four_bit`: bitsandbytes'; `dtype`: of the weights.

    `reference`: it holds a reference model; `padded`: its batches are; `unsloth`: it loaded the model; `offloads`: its
    checkpoints go to the host; `predicts_tokens`: the model's class predicts the next token.
    """

    model_class: str
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    dtype: str
    attention: str
    seq_len: int
    padded: bool = False
    packing: bool = False
    max_steps: int = 0
    batch_size: int = 0
    eval_batches: int = 0
    keeps_logits: bool = False
    checkpointing: bool = False
    unsloth: bool = False
    offloads: bool = False
    adapter: Mapping[str, Any] | None = None
    four_bit: Mapping[str, Any] | None = field(default=None)
    loop: str = "trainer"
    trl_trainer: str = ""
    reference: bool = False

    @property
    def predicts_tokens(self) -> bool:
        return self.model_class.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))

    @property
    def training(self) -> str:
        """Return what it is trained for; "" where that is not planned."""
        classifies = self.model_class.endswith("ForSequenceClassification")
        found = PLANNED.get(self.trl_trainer, "")
        if classifies:
            return {"sft": "classification" if not self.trl_trainer else "", "reward": "reward"}.get(found, "")
        return found if self.predicts_tokens else ""


def read_live(run: LiveRun) -> tuple[ModelSource, FineTune, dict[str, Bound]]:
    """Return (the model, how it is trained, what is not planned and the figures' bound). Raises UserError."""
    if run.trl_trainer not in PLANNED:
        raise UserError("usage.callback_trainer", trainer=run.trl_trainer)
    if not run.training:
        raise UserError("usage.callback_head", model=run.model_class)
    found = FileSettings("trainer", WHERE)
    training_arguments(Table(_arguments(run.arguments), found))
    if found.sharding:
        raise UserError("usage.callback_sharded", sharding=found.sharding)
    _adapter(run, found)
    _training(run, found)
    given = {
        "dtype": run.dtype, "seq_len": run.seq_len, "padded": run.padded, "packing": run.packing,
        "max_steps": max(0, run.max_steps), "keeps_logits": run.keeps_logits, "loop": run.loop,
        "gradient_checkpointing": run.checkpointing or found.values.get("gradient_checkpointing", False),
        "unsloth": run.unsloth, "offload_checkpoints": run.offloads,
    }  # fmt: skip
    if run.eval_batches:
        given["eval_batches"] = run.eval_batches
    if run.batch_size:
        given["batch_size"] = run.batch_size
    table = Table({"attn_implementation": run.attention}, found)
    table.put("attn", "attn_implementation")
    tune = FineTune.model_validate({**found.values, **given})
    if tune.copies_reference != run.reference:
        found.unplanned["ref_model"] = "at_least" if run.reference else "at_most"
    return _source(run), tune, found.unplanned


def _training(run: LiveRun, found: FileSettings) -> None:
    if run.training in PREFERENCES:
        preferences(Table({**_arguments(run.arguments), "training": run.training}, found))
        if run.arguments.get("disable_dropout", True):
            found.values.pop("lora_dropout", None)
    elif run.training == "classification":
        labels = run.config.get("id2label")
        found.values |= {"training": "classification", "labels": len(labels) if labels else FineTune().labels}


def _arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a plan reads; what is at its default of many keys, such as fsdp_config, says nothing by itself."""
    keys = {key: value for key, value in arguments.items() if value is not None}
    if not keys.get("fsdp"):
        keys.pop("fsdp_config", None)
        keys.pop("fsdp", None)
    return keys


def _adapter(run: LiveRun, found: FileSettings) -> None:
    """Method, rank, modules and dropout of peft's adapter. Raises UserError for an adapter other than LoRA."""
    adapter = run.adapter
    table = Table(dict(adapter or {}), found)
    if adapter is None:
        if run.four_bit is not None:
            raise UserError("usage.callback_adapter", kind="4-bit weights without an adapter")
        return
    put_adapter(table, _source(run).facts, four_bit=run.four_bit is not None)
    if run.four_bit is not None:
        found.values["double_quant"] = bool(run.four_bit.get("bnb_4bit_use_double_quant"))


def _source(run: LiveRun) -> ModelSource:
    """The model by its config, as if its weights were not quantized: the method says that they are."""
    left_out = {"quantization_config", "auto_map"} if run.four_bit is not None else {"auto_map"}
    if run.loop == "trl":  # which asks each mixture for them, whatever its config said
        left_out.add("output_router_logits")
    config = {key: value for key, value in run.config.items() if key not in left_out}
    name = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2] or str(config.get("model_type") or "")
    return ModelSource(name=name or run.model_class, where=run.model_class, config=config, facts=facts_of(config))


# A transformers model or its config, as it lies in memory, read as a model to plan. No torch.


class TransformersConfig(Protocol):
    model_type: str

    def to_dict(self) -> dict[str, Any]: ...


class TransformersModel(Protocol):
    """A model of transformers, or peft's around one."""

    config: Any

    def named_parameters(self) -> Any: ...

    def get_input_embeddings(self) -> Any: ...


def is_live(given: object) -> bool:
    return hasattr(given, "get_input_embeddings") or (hasattr(given, "model_type") and hasattr(given, "to_dict"))


def planned_config(config: Any) -> ModelSource:
    """The model that a config describes. Raises UserError for one that says less than is needed."""
    written = {key: value for key, value in config.to_dict().items() if key != "auto_map"}
    name = str(written.get("_name_or_path") or config.model_type).rstrip("/").rpartition("/")[2]
    return ModelSource(name=name, where=type(config).__name__, config=written, facts=facts_of(written))


def planned_model(model: Any) -> tuple[ModelSource, FineTune]:
    """Return (the model, how it would be trained as it is), all else at its default. Raises UserError."""
    base = base_of(model)
    four_bit = four_bit_of(base)
    run = LiveRun(
        model_class=type(base).__name__, config=config_of(base), arguments={}, dtype=dtype_of(base, four_bit),
        attention=attention_of(base), seq_len=FineTune().seq_len, checkpointing=checkpoints(base),
        unsloth=by_unsloth(model), offloads=offloads(model),
        adapter=adapter_of(model), four_bit=four_bit,
    )  # fmt: skip
    source, tune, _ = read_live(run)
    return source, tune


def base_of(model: Any) -> Any:
    """transformers' model within peft's and DistributedDataParallel's."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def config_of(base: Any) -> Mapping[str, Any]:
    return base.config.to_dict() if hasattr(base.config, "to_dict") else {}


def adapter_of(model: Any) -> Mapping[str, Any] | None:
    adapters = getattr(getattr(model, "module", model), "peft_config", None)
    return next(iter(adapters.values())).to_dict() if isinstance(adapters, Mapping) and adapters else None


def four_bit_of(base: Any) -> Mapping[str, Any] | None:
    found = config_of(base).get("quantization_config")
    return found if isinstance(found, Mapping) and found.get("load_in_4bit") else None


def attention_of(base: Any) -> str:
    return str(getattr(base.config, "_attn_implementation", None) or "sdpa")


def checkpoints(base: Any) -> bool:
    """Whether it recomputes activations; transformers 5 has another word for it than earlier ones."""
    new = "is_activation_checkpointing"
    return bool(getattr(base, new if hasattr(type(base), new) else "is_gradient_checkpointing", False))


def by_unsloth(model: Any) -> bool:
    """Whether unsloth loaded it, for adapters (models/llama.py) or for a full fine-tuning (models/vision.py)."""
    base = base_of(model)
    return any(getattr(base, mark, False) is True for mark in ("_unsloth_fast_path", "_unsloth_full_finetuning"))


def offloads(model: Any) -> bool:
    return getattr(getattr(model, "module", model), "_unsloth_gradient_checkpointing", "") == "unsloth"


def dtype_of(base: Any, four_bit: Any) -> str:
    """Of most of the frozen or trained weights; of those in 4 bits, that in which they were published."""
    if four_bit is not None:
        return str(getattr(base.config, "dtype", None) or "bfloat16").removeprefix("torch.")
    counts: dict[str, int] = {}
    for name, parameter in base.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            word = str(parameter.dtype).removeprefix("torch.")
            counts[word] = counts.get(word, 0) + parameter.numel()
    return max(counts, key=lambda word: counts[word], default="float32")
