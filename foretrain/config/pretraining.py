"""Whether words are about pretraining, as far as can be told without the modules that read fine-tuning runs."""

from collections.abc import Sequence
from pathlib import Path

from foretrain.config.hub.models import model_named
from foretrain.config.presets import PRESET_ALIASES, PRESETS


def is_surely_asked(words: Sequence[str]) -> bool:
    """True only where `config.finetune.asked.is_asked` says no, and has no note: of options alone, of a preset that is
    no model of Hugging Face's, and of a TOML file."""
    first = words[0] if words else "-"
    if first.startswith("-"):
        return True
    if first.startswith("hf:") or model_named(first) is not None:
        return False
    path = Path(first)
    return first in PRESETS or first in PRESET_ALIASES or (path.suffix == ".toml" and path.is_file())
