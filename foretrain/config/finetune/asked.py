"""Whether words ask for a fine-tuning run: `llama-3.2-1b --method lora`, `hf:owner/name`, a trainer's file."""

from collections.abc import Sequence
from pathlib import Path

from foretrain.config.finetune.options import OPTION_OF
from foretrain.config.finetune.read import is_finetune_file
from foretrain.config.hub.source import model_named
from foretrain.config.options import OPTIONS
from foretrain.config.presets import PRESET_ALIASES, PRESETS

SPELLINGS = {alias for option in OPTIONS.values() for alias in option.aliases}


def is_asked(words: Sequence[str] | None) -> bool:
    """Whether the first word is a model of Hugging Face's, or how somebody fine-tunes one. A name that is a preset of
    ours too is a fine-tuning run with an option that only such a run has, such as --method."""
    first = words[0] if words else "-"
    if first.startswith("-"):
        return False
    if first in PRESETS or first in PRESET_ALIASES:
        return model_named(first) is not None and any(_of_finetuning(word) for word in words or [])
    if first.startswith("hf:") or model_named(first) is not None:
        return True
    path = Path(first)
    return (path / "config.json").is_file() or path.name == "config.json" or is_finetune_file(first)


def _of_finetuning(word: str) -> bool:
    """Whether a word is an option of a fine-tuning run, and none of a config."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    return word.startswith("--") and name in OPTION_OF and name not in OPTIONS and name not in SPELLINGS
