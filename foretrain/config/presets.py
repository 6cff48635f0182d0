"""Named starting points: one line a model. `foretrain plan gpt2-124m --gpu "RTX 4070"`."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from foretrain.base.records import Record


class ModelPreset(Record):
    """A published model: its name here, its repository and others of the same sizes, and its config.json."""

    name: str
    repository: str
    same_as: tuple[str, ...] = ()
    parameters: int  # as published, a tied head counted once
    config: dict[str, object]


@cache
def _text() -> str:
    return Path(__file__).with_name("models.toml").read_text("utf-8")


@cache
def models() -> Mapping[str, ModelPreset]:
    found = tomllib.loads(_text())
    return {
        name: ModelPreset.model_validate({"name": name, **table, "config": _nulls(table["config"])})
        for name, table in found.items()
    }


def _nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if value == "null" else _nulls(value) if isinstance(value, dict) else value
        for key, value in table.items()
    }


@cache
def _spellings() -> Mapping[str, str]:
    return {
        word.lower(): preset.name
        for preset in models().values()
        for word in (preset.name, preset.repository, *preset.same_as)
    }


IN_FOUR_BITS = re.compile(r"(?<=.)(-unsloth)?-bnb-4bit$", re.IGNORECASE)  # ends of names of bitsandbytes' copies
# Repositories in whose place unsloth loads its copy with some layers in 16 bits, where it loads 4 bits
# (unslothai/unsloth, models/mapper.py of August 2026).
_DYNAMIC = re.compile(
    r"(unsloth|meta-llama|qwen|google|microsoft|mistralai|deepseek-ai)/(qwen3-(0\.6|1\.7|4|8|14)b|qwen3-vl-(?!30)|qwq"
    r"|qwen2\.5-((0\.5|1\.5|3|7|14)b(-instruct)?$|vl-)|(meta-)?llama-3\.[123]-(?!70b)|llama-3\.3-|gemma-3-"
    r"|functiongemma|phi-4|mistral-small-24b|mixtral-8x7b|deepseek-r1-distill-(?!llama-70b|qwen-32b)).*",
    re.IGNORECASE,
)


def keeps_layers(repository: str, *, unsloth: bool) -> bool:
    """Whether what is loaded in 4 bits keeps some layers in 16, which only its config.json would name."""
    copy = IN_FOUR_BITS.search(repository)
    return bool(copy[1]) if copy else unsloth and bool(_DYNAMIC.fullmatch(repository))


def model_named(word: str) -> ModelPreset | None:
    word = IN_FOUR_BITS.sub("", word)
    if word.lower().startswith("unsloth/") and word.lower() not in _spellings():  # the model itself, under its name
        copied = word.partition("/")[2].lower()
        word = next((each for each in _spellings() if each.partition("/")[2] == copied), word)
    if word.lower() not in _text().lower():  # most words are presets of ours, for whom nothing need be parsed
        return None
    name = _spellings().get(word.lower())
    return models()[name] if name else None


# Shapes of the GPT-2 family: Radford et al. 2019, and karpathy/nanoGPT model.py for the parameter counts.
GPT2_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}

# One optimizer step of about half a million tokens, and a schedule over 10 billion, as GPT-2 reproductions use.
_HALF_MILLION: dict[str, Any] = {"max_iters": 19_073, "lr_decay_iters": 19_073, "warmup_iters": 700}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {**GPT2_SHAPES["gpt2"], "batch_size": 8, "gradient_accumulation_steps": 64, **_HALF_MILLION},
    "gpt2-350m": {**GPT2_SHAPES["gpt2-medium"], "batch_size": 4, "gradient_accumulation_steps": 128,
                  "learning_rate": 3e-4, "min_lr": 3e-5, **_HALF_MILLION},
    "gpt2-774m": {**GPT2_SHAPES["gpt2-large"], "batch_size": 2, "gradient_accumulation_steps": 256,
                  "learning_rate": 2.5e-4, "min_lr": 2.5e-5, **_HALF_MILLION},
    "gpt2-1558m": {**GPT2_SHAPES["gpt2-xl"], "batch_size": 1, "gradient_accumulation_steps": 512,
                   "learning_rate": 2e-4, "min_lr": 2e-5, **_HALF_MILLION},
    "gpt2-40m": {"n_layer": 12, "n_head": 12, "n_embd": 384, "batch_size": 16, "gradient_accumulation_steps": 32,
                 "learning_rate": 1e-3, "min_lr": 1e-4, **_HALF_MILLION},
    "gpt2-30m": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 16,
                 "gradient_accumulation_steps": 64, "learning_rate": 1e-3, "min_lr": 1e-4, **_HALF_MILLION},
    # Llama and Qwen3: config.json of the published models; contexts and batches are what a single card can train.
    "llama-124m": {"recipe": "llama", **GPT2_SHAPES["gpt2"], "tied_embeddings": True, "batch_size": 8,
                   "gradient_accumulation_steps": 64, **_HALF_MILLION},
    "smollm2-135m": {"recipe": "llama", "n_layer": 30, "n_head": 9, "n_embd": 576, "n_kv_head": 3, "mlp_width": 1536,
                     "rope_theta": 1e5, "tied_embeddings": True, "vocab_size": 49_152, "block_size": 2048,
                     "batch_size": 4, "gradient_accumulation_steps": 64, **_HALF_MILLION},
    "qwen3-0.6b": {"recipe": "llama", "n_layer": 28, "n_head": 16, "n_embd": 1024, "n_kv_head": 8, "head_dim": 128,
                   "mlp_width": 3072, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "tied_embeddings": True,
                   "vocab_size": 151_936, "block_size": 2048, "batch_size": 1, "gradient_accumulation_steps": 256,
                   "learning_rate": 3e-4, "min_lr": 3e-5, **_HALF_MILLION},
    "tinyllama-1.1b": {"recipe": "llama", "n_layer": 22, "n_head": 32, "n_embd": 2048, "n_kv_head": 4,
                       "mlp_width": 5632, "vocab_size": 32_000, "block_size": 2048, "batch_size": 1,
                       "gradient_accumulation_steps": 256, "learning_rate": 3e-4, "min_lr": 3e-5, **_HALF_MILLION},
    # Without the scaling of its rotary positions, which is for contexts above 8,192 tokens.
    "llama-3.2-1b": {"recipe": "llama", "n_layer": 16, "n_head": 32, "n_embd": 2048, "n_kv_head": 8, "mlp_width": 8192,
                     "rope_theta": 5e5, "tied_embeddings": True, "vocab_size": 128_256, "block_size": 2048,
                     "batch_size": 1, "gradient_accumulation_steps": 256, "learning_rate": 3e-4, "min_lr": 3e-5,
                     **_HALF_MILLION},
    # nanochat's d20: 64 columns of width a layer, heads of 128; its own step of 524,288 tokens, 20 tokens a parameter.
    "nanochat-d20": {"recipe": "nanochat", "n_layer": 20, "n_head": 10, "n_embd": 1280, "vocab_size": 65_536,
                     "block_size": 2048, "batch_size": 4, "gradient_accumulation_steps": 64, "max_iters": 21_400,
                     "lr_decay_iters": 21_400},
    "shakespeare-char": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64,
                         "gradient_accumulation_steps": 1, "dropout": 0.2, "vocab_size": 65,
                         "dataset": "shakespeare_char", "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99,
                         "warmup_iters": 100, "max_iters": 5000, "lr_decay_iters": 5000, "eval_interval": 250,
                         "log_interval": 10, "always_save_checkpoint": False, "out_dir": "out-shakespeare-char"},
    # Small enough to learn something on two CPU cores within two minutes; bytes of Python source.
    "baby": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 16,
             "gradient_accumulation_steps": 1, "vocab_size": 256, "dataset": "python-stdlib", "tokenizer": "byte",
             "learning_rate": 3e-3, "min_lr": 3e-4, "beta2": 0.99, "warmup_iters": 50, "max_iters": 1200,
             "lr_decay_iters": 1200, "eval_interval": 300, "eval_iters": 10, "log_interval": 10,
             "compile": False, "out_dir": "out-baby"},
}  # fmt: skip

# The names that everybody knows; the same presets.
PRESET_ALIASES = {"gpt2": "gpt2-124m", "gpt2-medium": "gpt2-350m", "gpt2-large": "gpt2-774m", "gpt2-xl": "gpt2-1558m"}


def preset_named(word: str) -> str | None:
    name = PRESET_ALIASES.get(word.lower(), word.lower())
    return name if name in PRESETS else None


def is_surely_asked(words: Sequence[str]) -> bool:
    """Return True only where `is_asked` says no without a note: of options alone, our own presets, and a TOML file."""
    first = words[0] if words else "-"
    if first.startswith("-"):
        return True
    if first.startswith("hf:") or model_named(first) is not None:
        return False
    path = Path(first)
    return first in PRESETS or first in PRESET_ALIASES or (path.suffix == ".toml" and path.is_file())
