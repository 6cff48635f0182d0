"""Simple statistics of a dataset: what a model must beat."""

import importlib.util
from pathlib import Path

from foretrain.lm.dataset import DatasetInfo

_MAX_TOKENS = 50_000_000


def unigram_entropy(info: DatasetInfo) -> float | None:
    """Cross-entropy in nats a token of the validation split under the training split's token frequencies.

    It is the loss of the best model that knows how often tokens occur and nothing of their order; a language model
    must be well below. None where the files are not there or numpy is not installed. At most 50 M tokens are read.
    """
    if importlib.util.find_spec("numpy") is None:
        return None
    import numpy as np

    counts = []
    for split in ("train", "val"):
        path = Path(info.path) / f"{split}.bin"
        if not path.is_file():
            return None
        ids = np.fromfile(path, dtype=info.dtype, count=_MAX_TOKENS)
        counts.append(np.bincount(ids, minlength=info.vocab_size or 0).astype(np.float64))
    size = max(len(c) for c in counts)
    train, val = (np.pad(c, (0, size - len(c))) for c in counts)
    smoothed = (train + 1) / (train.sum() + size)  # add-one, so that a token seen only in val has a probability
    return float(-(val * np.log(smoothed)).sum() / val.sum())
