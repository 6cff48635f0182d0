"""Simple statistics of a dataset: what a model must beat."""

import importlib.util
from typing import TYPE_CHECKING

from foretrain.base.errors import UserError
from foretrain.data.dataset import DatasetInfo
from foretrain.data.token_reader import readers

if TYPE_CHECKING:
    import numpy as np

_MAX_TOKENS = 50_000_000
_PIECE_TOKENS = 2**22


def unigram_entropy(info: DatasetInfo) -> float | None:
    """Cross-entropy in nats a token of the validation split under the training split's token frequencies.

    It is the loss of the best model that knows how often tokens occur and nothing of their order; a language model
    must be well below. None where the files are not there or numpy is not installed. At most 50 M tokens are read.
    """
    fetched = info.remote or any(part.dataset.remote for part in info.parts)
    if importlib.util.find_spec("numpy") is None or fetched:
        return None
    import numpy as np

    try:
        counts = [_counts(info, split) for split in ("train", "val")]
    except (UserError, OSError):
        return None
    size = max(len(c) for c in counts)
    train, val = (np.pad(c, (0, size - len(c))) for c in counts)
    smoothed = (train + 1) / (train.sum() + size)  # add-one, so that a token seen only in val has a probability
    return float(-(val * np.log(smoothed)).sum() / val.sum())


def _counts(info: DatasetInfo, split: str) -> "np.ndarray":
    """How often each id occurs; in a mixture each part counts by its share."""
    import numpy as np

    parts = list(zip(readers(info, split, verify=False), [p.weight for p in info.parts] or [1.0], strict=True))
    looked_at = min(_MAX_TOKENS, *(reader.tokens / share for reader, share in parts))
    total = np.zeros(info.vocab_size or 0)
    for reader, share in parts:
        tokens = round(looked_at * share)
        for position in range(0, tokens, _PIECE_TOKENS):
            piece = reader.read(position, min(_PIECE_TOKENS, tokens - position))
            ids = np.frombuffer(piece, dtype=f"<u{reader.item_bytes}")
            found = np.bincount(ids, minlength=len(total)).astype(np.float64)
            found[: len(total)] += total
            total = found
    return total
