"""Small versions of models that people fine-tune: the preset's config.json with few and narrow layers."""

from typing import Any

from foretrain.advice.finetune import SearchedPlan, search_of, together
from foretrain.advice.record import Advice
from foretrain.config.hub.facts import ModelSource
from foretrain.config.presets import models

# A preset of each family whose trace is compared with the real allocator.
FAMILIES = (
    "llama-3.2-1b", "qwen3-0.6b", "gemma-3-270m", "smollm2-135m", "smollm3-3b", "pythia-160m", "phi-2",
    "mistral-7b-v0.1", "santacoder", "gpt2", "qwen2.5-0.5b", "phi-3.5-mini",
)  # fmt: skip
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b")  # of experts
LAYERS, HEADS = 2, 4
_SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "head_dim": 32,
    "num_attention_heads": HEADS, "max_position_embeddings": 128, "sliding_window": 32, "max_window_layers": LAYERS,
    "n_embd": 128, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128, "n_inner": 256,
    "num_experts": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def small(name: str, **other: int) -> dict[str, Any]:
    """The config.json of a small version of a preset: all that is not a size is the preset's own. `other`: sizes."""
    config, sizes = dict(models()[name].config), {**_SIZES, **other}
    found = {key: sizes.get(key, value) if value is not None else None for key, value in config.items()}
    if "num_key_value_heads" in config:
        grouped = config["num_key_value_heads"] < config["num_attention_heads"]
        found["num_key_value_heads"] = 2 if grouped else sizes["num_attention_heads"]
    for key in ("layer_types", "no_rope_layers"):
        if config.get(key):
            found[key] = config[key][-LAYERS:]
    if isinstance(found.get("rope_scaling"), dict):
        found["rope_scaling"] = {**found["rope_scaling"], "original_max_position_embeddings": 64}
    return {**found, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def source_of(config: dict[str, Any], name: str = "small") -> ModelSource:
    return ModelSource(name=name, where=name, config=config, facts=None)


def planned(plan: SearchedPlan, ids: tuple[str, ...]) -> Advice | None:
    """The plan with the changes of these rules; None where one of them changes nothing."""
    search = search_of(plan, "fit")
    made = together(search, ids)
    return search.advice(made) if made else None
