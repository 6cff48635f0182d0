"""What a plan says of the data besides epochs: the parts of a mixture, and what drawing at random leaves unseen."""

import math
from collections.abc import Iterator

from foretrain.config.options import RunConfig
from foretrain.data.dataset import DatasetInfo
from foretrain.predict.plan import Note


def data_notes(config: RunConfig, info: DatasetInfo | None) -> Iterator[Note]:
    """Of a dataset that is here and was prepared by foretrain, or is a mixture."""
    if info is None or info.format not in ("foretrain", "mix") or config.eval_only:
        return
    tokens = config.max_iters * config.tokens_per_step
    for part in info.parts:
        values = {"name": part.dataset.name, "share": part.weight, "tokens": part.dataset.train_tokens}
        yield Note(id="mix_part", values={**values, "epochs": tokens * part.weight / part.dataset.train_tokens})
    if info.parts or not info.train_tokens:
        return
    epochs = tokens / info.train_tokens
    if config.data_order == "random":
        # A token is missed by one row with probability 1 - block / tokens, and rows are drawn independently.
        yield Note(id="data_random", values={"epochs": epochs, "seen": -math.expm1(-epochs)})
    else:
        yield Note(id="data_epochs", values={"epochs": epochs, "block": config.block_size})
