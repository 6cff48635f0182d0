"""model/host/checkpoints.py on tensors without values: which inputs of blocks are on the device, and when. No torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Checkpoint, checkpointed
from foretrain.predict.abstract.tensors import Tensor


class Inputs:
    """Calls checkpointed blocks. An input is gone when its block has run; the place that it comes back to is taken when
    the block after it is recomputed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._places: dict[int, Tensor] = {}

    def call(self, i: int, block: Callable[..., Any], x: Tensor, *others: Tensor) -> Any:
        """What block i makes of x."""
        result, frame = checkpointed(block, (x, *others), whole=False)
        if frame is not None:
            stays = i == self.count - 1
            if not stays:
                frame.leave()
            frame.arriving = partial(self._arriving, i, stays)
        return result

    def _arriving(self, i: int, stays: bool, frame: Checkpoint) -> Tensor:
        like: Tensor = frame.args[0]
        found = like if stays else self._places.pop(i)
        if i:
            self._places[i - 1] = m.allocate(like.shape, like.dtype, "activations.residual")
        return found
