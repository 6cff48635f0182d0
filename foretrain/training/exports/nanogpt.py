"""The form `nanogpt`: ckpt.pt as nanoGPT's train.py and sample.py load it."""

from pathlib import Path

import torch

from foretrain.base.errors import UserError
from foretrain.config.families import family_of
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.model import foreign
from foretrain.model.step import learning_rate
from foretrain.training import checkpoint
from foretrain.training.exports.forms import FormOptions
from foretrain.training.exports.source import Source


def refusal(config: RunConfig) -> UserError | None:
    name = family_of(config).name
    return None if name == "nanogpt" else UserError("usage.export_recipe", recipe=name, form="nanogpt")


def write(source: Source, folder: Path, options: FormOptions) -> None:
    """Write ckpt.pt, with the optimizer's state. Raises UserError where nanoGPT has no such optimizer."""
    config, record = source.config, source.record
    with checkpoint.tensors_in(source.path, "optimizer") as held:
        moments = {key: split.whole() for key, split in held.items()}
    kinds = {key.split("/", 1)[0] for key in moments}
    if not kinds <= {"step", "exp_avg", "exp_avg_sq"}:
        raise UserError("usage.export_optimizer", kinds=sorted(kinds))
    rate = learning_rate(config, source.progress.step)
    fused = record.gpu.kind == "cuda"
    optimizer = foreign.nanogpt_optimizer(source.weights, moments, config, rate, fused=fused)
    values = {option.name: getattr(config, option.name) for option in OPTIONS.values() if not option.ours}
    values |= {"device": record.gpu.kind, "dtype": record.dtype, "compile": record.compiled, "init_from": "resume"}
    arguments = (*named(lambda option: option.from_weights and option.nanogpt != "cannot"), "dropout")
    best = source.progress.best_val_loss
    document = {
        "model": {**source.weights, "lm_head.weight": source.weights[source.shape.family.tokens[0]]},
        "optimizer": optimizer,
        "model_args": {key: getattr(config, key) for key in arguments},
        "iter_num": source.progress.step,
        "best_val_loss": 1e9 if best is None else best,  # nanoGPT's own word for none yet
        "config": values,
    }
    torch.save(document, folder / "ckpt.pt")
