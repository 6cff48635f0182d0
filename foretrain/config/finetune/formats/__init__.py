"""The formats that people have a fine-tuning run in, one file each. A new one is a file and its line here."""

from foretrain.config.finetune.formats import axolotl, llama_factory, own_loops, torchtune, trainer, trl, unsloth
from foretrain.config.finetune.formats.format import Format

# Where two have as many keys of a file, the first is meant.
_ORDER = (
    trainer.ACCELERATE, *own_loops.FORMATS, torchtune.FORMAT, llama_factory.FORMAT_V1, llama_factory.FORMAT,
    unsloth.FORMAT, axolotl.FORMAT, trl.FORMAT, trainer.FORMAT,
)  # fmt: skip
FORMATS: dict[str, Format] = {each.name: each for each in _ORDER}
