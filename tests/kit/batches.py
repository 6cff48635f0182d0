"""The micro-batches of a step one after the other, as the trainer's feed gives them."""

from collections.abc import Iterator
from typing import Any

import torch

from foretrain.data.batches import Batch, TokenFile, train_starts


def train_batches(
    tokens: TokenFile, seed: int, step: int, *, block: int, device: torch.device, **cut: Any
) -> Iterator[Batch]:
    for first in train_starts(tokens, seed, step, block=block, **cut):
        yield tokens.batch(first, block, device)
