"""Before a run in one of the modes of `matmul`: how far it is from the plain dtype on this very model and data."""

from collections.abc import Callable

import torch

from foretrain.data.batches import TokenFile, evaluation_batches
from foretrain.hardware.catalogue import Dtype
from foretrain.model.precision_check import BATCHES, compare, rows_of_check
from foretrain.model.step import TrainState


def run(state: TrainState, tokens: TokenFile, dtype: Dtype, note: Callable[..., None]) -> None:
    """Compare, and tell `note`. Moves nothing that training depends on.

    Raises UserError 'diverged.matmul' when the mode is far off.
    """
    config = state.config
    if state.unconverted:
        note("matmul_left", mode=config.matmul, layers=list(state.unconverted))
    rows, block = rows_of_check(config.block_size)
    batches = evaluation_batches(
        tokens, config.seed, "train", rows=rows * BATCHES, batch_size=rows, block=block, device=state.device
    )
    agreement = compare(state, batches, dtype)
    note("matmul_check", **agreement.values())
    agreement.refuse()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()  # what the check took is not the run's
