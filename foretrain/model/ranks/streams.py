"""Dropout that does not depend on who runs a micro-batch: the generator is seeded again before each, by its number.

A number is that of the whole step, over all ranks, so the same rows meet the same masks on any number of ranks.
"""

from collections.abc import Iterable, Iterator

import torch

from foretrain.data.batches import Batch, starts

_STREAM = 0x44524F50  # 'DROP': apart from those of data/batches.py
_SEEDS = 1 << 62


def seed_of(seed: int, step: int, micro_batch: int) -> int:
    return int(starts(seed, _STREAM, step, micro_batch + 1, _SEEDS)[-1])


def seeded(batches: Iterable[Batch], seed: int, step: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """Yield the micro-batches that a rank runs of a step, `world` apart as data/batches.py deals them; before each is
    given out, the generators of this process are seeded for it.
    """
    for number, batch in enumerate(batches):
        torch.manual_seed(seed_of(seed, step, rank + number * world))
        yield batch
