from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique

CHUNKS = (4096, 2048, 1024, 512, 256)
USUAL = 1024
MOST_CHUNKS = 1024  # beyond it, launching their kernels takes longer than running them


def _cuts_too_often(c: RunConfig) -> bool:
    return 0 < c.loss_chunk_size * MOST_CHUNKS < c.batch_size * c.block_size


class ChunkedLoss(Technique):
    """The logits of a micro-batch never exist together (model/loss.py)."""

    id = "chunked_loss"
    options: Mapping[str, Any] = {"loss_chunk_size": 512}
    saves = "all logits of a micro-batch except those of one chunk: 2 to 10 bytes per token and vocabulary entry"
    costs = "gradients of the head are saved for backward; 20% of the step on the one card that was measured (H100)"
    source = "Wijmans et al. 2024, arXiv:2411.09009; our own autograd function"
    refuses = ((("loss_chunk_size", "batch_size"), _cuts_too_often, "too_many_chunks"),)
    place, drop_order, try_order, quick, lets_grow = 10, 40, 2, True, True

    def change(self, model: Any, config: RunConfig) -> None:
        if config.loss_chunk_size:
            from foretrain.model.loss import ChunkedLoss

            model.chunked_loss = ChunkedLoss(config.loss_chunk_size)

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        now = c.loss_chunk_size or max(c.batch_size * c.block_size, c.eval_batch * c.eval_block)
        if c.auto_chunker and c.compile:
            return []
        return [{"loss_chunk_size": n} for n in CHUNKS if n < now <= MOST_CHUNKS * n]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "already_on" if c.loss_chunk_size or c.auto_chunker else "too_small"

    def usual(self, found: Sequence[Options]) -> int:
        return next((i for i, options in enumerate(found) if options["loss_chunk_size"] <= USUAL), 0)

    def undone(self, c: RunConfig) -> Sequence[Options]:
        return [{"loss_chunk_size": n} for n in (0, 4 * c.loss_chunk_size)] if c.loss_chunk_size else []


TECHNIQUES = (ChunkedLoss(),)
