"""The form `hf`: what transformers' AutoModelForCausalLM and AutoTokenizer read, and a model card."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from foretrain.base.errors import UserError
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.data.hf_tokenizer import files_of
from foretrain.model import foreign
from foretrain.training.exports.forms import FormOptions
from foretrain.training.exports.source import Source, write_json

CARD = "README.md"
_MOST_SUPPRESSED = 1000  # rows beyond the tokenizer that generation_config.json can name one by one


def refusal(config: RunConfig) -> UserError | None:
    family = family_of(config)
    return None if family.hugging_face else UserError("usage.export_recipe", recipe=family.name, form="hf")


def write(source: Source, folder: Path, options: FormOptions) -> None:
    config = source.config
    words = source.tokenizer()
    separator = source.separator(words)
    made = foreign.to_hugging_face(source.weights, source.shape)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", source.shape.family.write_config(config, separator))
    generation: dict[str, Any] = {"bos_token_id": separator, "eos_token_id": separator}
    if words is not None and 0 < config.vocab_size - words.vocab_size <= _MOST_SUPPRESSED:
        generation["suppress_tokens"] = list(range(words.vocab_size, config.vocab_size))  # rows that no text has
    write_json(folder / "generation_config.json", generation)
    if source.shape.family.name == "nanogpt" and not config.bias:
        source.notes.append("zero_biases")
    files = files_of(words, config.block_size) if words is not None else {}
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    if not files:
        source.notes.append("no_tokenizer")
    if options.card is not None:
        (folder / CARD).write_text(options.card(source), "utf-8")
