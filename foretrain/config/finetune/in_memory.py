"""A transformers model or its config, as it lies in memory, read as a model to plan. No torch: only what it says of
itself is asked."""

from collections.abc import Mapping
from typing import Any, Protocol

from foretrain.config.finetune.live import LiveRun, read_live
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.read import facts_of


class TransformersConfig(Protocol):
    """A config of transformers: `AutoConfig.from_pretrained(…)`."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        ...


class TransformersModel(Protocol):
    """A model of transformers, or peft's around one."""

    config: Any

    def named_parameters(self) -> Any:
        """Its weights, by name."""
        ...

    def get_input_embeddings(self) -> Any:
        """What every language model of transformers has."""
        ...


def is_live(given: object) -> bool:
    """Whether it is a model or a config of transformers."""
    return hasattr(given, "get_input_embeddings") or (hasattr(given, "model_type") and hasattr(given, "to_dict"))


def planned_config(config: Any) -> ModelSource:
    """The model that a config describes. Raises UserError for one that says less than is needed."""
    written = {key: value for key, value in config.to_dict().items() if key != "auto_map"}
    name = str(written.get("_name_or_path") or config.model_type).rstrip("/").rpartition("/")[2]
    return ModelSource(name=name, where=type(config).__name__, config=written, facts=facts_of(written))


def planned_model(model: Any) -> tuple[ModelSource, FineTune]:
    """(the model, how it would be trained as it is): adapters, 4-bit weights and recomputation are read from it, all
    else is at its default. Raises UserError for what cannot be planned, such as an adapter that is no LoRA."""
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
    """Its config.json; nothing of one that has none."""
    return base.config.to_dict() if hasattr(base.config, "to_dict") else {}


def adapter_of(model: Any) -> Mapping[str, Any] | None:
    """peft's config, or None where there is no adapter."""
    adapters = getattr(getattr(model, "module", model), "peft_config", None)
    return next(iter(adapters.values())).to_dict() if isinstance(adapters, Mapping) and adapters else None


def four_bit_of(base: Any) -> Mapping[str, Any] | None:
    """bitsandbytes' quantization config of weights in 4 bits, or None."""
    found = config_of(base).get("quantization_config")
    return found if isinstance(found, Mapping) and found.get("load_in_4bit") else None


def attention_of(base: Any) -> str:
    """Its attention, in transformers' word."""
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
    """Whether unsloth's checkpoints go to the host."""
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
