"""Whether words ask for a fine-tuning run: `llama-3.2-1b --method lora`, `hf:owner/name`, a trainer's file."""

from collections.abc import Sequence
from pathlib import Path

from foretrain.base.records import Note
from foretrain.config.finetune.options import OPTION_OF
from foretrain.config.finetune.read import is_finetune_file
from foretrain.config.hub.source import MODEL_FILES, is_repository, model_named
from foretrain.config.options import OPTIONS
from foretrain.config.presets import PRESET_ALIASES, PRESETS
from foretrain.config.resolve import is_nanogpt_table

GPT_SUFFIXES = (".toml", ".py")  # of configs to pretrain with
TRAINER_SUFFIXES = (".yaml", ".yml", ".json")
SPELLINGS = {alias for option in OPTIONS.values() for alias in option.aliases}


def is_asked(words: Sequence[str] | None) -> bool:
    """Whether the first word is a model of Hugging Face's, or how somebody fine-tunes one. A name that is a preset of
    ours too is a fine-tuning run with an option that only such a run has, such as --method."""
    first = words[0] if words else "-"
    if first.startswith("-"):
        return False
    if first in PRESETS or first in PRESET_ALIASES:
        return model_named(first) is not None and bool(_deciding(words or []))
    if first.startswith("hf:") or model_named(first) is not None:
        return True
    path = Path(first)
    if is_nanogpt_table(path):
        return False
    if any((path / name).is_file() for name in MODEL_FILES) or path.name in MODEL_FILES or is_finetune_file(first):
        return True
    if path.suffix == ".json" and path.is_file():  # a model's config.json under another name
        return True
    if is_repository(first) and path.suffix not in GPT_SUFFIXES:
        return True
    return not path.exists() and (path.suffix in TRAINER_SUFFIXES or bool(_deciding(words or [])))


def how_chosen(words: Sequence[str] | None) -> tuple[Note, ...]:
    """A sentence on which of the two was taken of a name that is a preset of ours and a model of Hugging Face's, why,
    and how to get the other; nothing of any other name."""
    first = words[0] if words else ""
    if (first not in PRESETS and first not in PRESET_ALIASES) or model_named(first) is None:
        return ()
    if options := _deciding(words or []):
        return (Note(id="chose_finetuning", values={"name": first, "options": options}),)
    return (Note(id="chose_pretraining", values={"name": first}),)


def _deciding(words: Sequence[str]) -> list[str]:
    """The options among words that only a fine-tuning run has."""
    return list(dict.fromkeys(word.partition("=")[0] for word in words if _of_finetuning(word)))


def _of_finetuning(word: str) -> bool:
    """Whether a word is an option of a fine-tuning run, and none of a config."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    return word.startswith("--") and name in OPTION_OF and name not in OPTIONS and name not in SPELLINGS
