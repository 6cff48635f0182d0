"""One evaluation of one split: the mean loss over its sequences, whatever they are cut into.

A batch's loss is a mean over its tokens, so a smaller last batch counts for less. Nothing is kept from one batch to the
next but a sum: no logits, no graph.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from foretrain.data.batches import Batch
from foretrain.training.compilation import NotCompiled, not_compiled
from foretrain.training.microbatch import is_out_of_memory

MEASURED = 2  # batches that show the peak

Failed = Literal["out of memory"] | NotCompiled
Mean = float | None | Failed


def mean_loss(
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], torch.Tensor],
    *,
    batch_size: int,
    measure: AbstractContextManager[None] | None,
    stopping: Callable[[], bool],
    failed: Callable[[BaseException, int], None] = lambda error, begun: None,
) -> Mean:
    """The mean loss in nats a token; None where a stop was asked for in between; why there is none.

    `measure` is entered around the first two batches, which a stop does not interrupt. `failed` is as in `attempt`.
    """
    try:
        return _mean(batches, loss_of, batch_size, measure, stopping)
    except Exception as error:
        if (reason := not_compiled(error)) is not None:
            return reason
        if not is_out_of_memory(error):
            raise
        failed(error, 0)
    return "out of memory"


def _mean(
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], torch.Tensor],
    batch_size: int,
    measure: AbstractContextManager[None] | None,
    stopping: Callable[[], bool],
) -> float | None:
    total: torch.Tensor | float = 0.0
    weight = 0.0
    with measure or nullcontext():
        for _, batch in zip(range(MEASURED if measure else 0), batches, strict=False):
            share = len(batch[0]) / batch_size
            total, weight = total + loss_of(batch) * share, weight + share
    for batch in batches:
        if stopping():
            return None
        share = len(batch[0]) / batch_size
        total, weight = total + loss_of(batch) * share, weight + share
    return float(total) / weight
