"""The form `safetensors`: weights by nanoGPT's names, and all options. `init_from` reads it back."""

from pathlib import Path

from safetensors.torch import save_file

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.training.exports.forms import FormOptions
from foretrain.training.exports.source import Source, write_json


def refusal(config: RunConfig) -> UserError | None:
    return None


def write(source: Source, folder: Path, options: FormOptions) -> None:
    save_file(source.weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", source.config.model_dump())
