"""A model, a run and a dataset that train in a second."""

from pathlib import Path

import numpy as np

from foretrain.config.options import RunConfig

# A model and a run that train in a second.
TINY = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 96, "batch_size": 4,
    "gradient_accumulation_steps": 2, "max_iters": 12, "lr_decay_iters": 12, "warmup_iters": 2, "eval_interval": 5,
    "eval_iters": 2, "learning_rate": 1e-2, "min_lr": 1e-3, "device": "cpu", "compile": False, "dataset": "toy",
    "log_interval": 1,
}  # fmt: skip


def tiny(**changes: object) -> RunConfig:
    return RunConfig.model_validate({**TINY, **changes})


def write_dataset(folder: Path, tokens: int = 2000, vocab: int = 96, seed: int = 0) -> Path:
    """A dataset in nanoGPT's layout with something to learn: each token mostly follows from the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for split, count in (("train", tokens), ("val", max(1, tokens // 4))):
        ids = np.cumsum(random.integers(1, 3, count)) % vocab
        ids.astype(np.uint16).tofile(folder / f"{split}.bin")
    return folder
