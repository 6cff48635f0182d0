"""The logits that an evaluation collects on the card. No torch.

transformers trainer.py (evaluation_loop) and trainer_pt_utils.py (EvalLoopContainer): each batch is joined to what is
there in a new tensor, and a variable holds the last batch's until the next one is made.
"""

from collections.abc import Iterator

from foretrain.predict.timeline import Tensor, Timeline

WRITTEN = 64  # batches that are written out; of more the first ones and the last two


def numbers(batches: int) -> Iterator[int]:
    """The numbers of the batches that are written out, from 1."""
    if batches <= WRITTEN:
        yield from range(1, batches + 1)
    else:
        yield from range(1, WRITTEN - 1)
        yield from (batches - 1, batches)


class Collected:
    """What was collected so far. `most`: batches after which all goes to the host (eval_accumulation_steps)."""

    def __init__(self, t: Timeline, item_bytes: int, most: int) -> None:
        self.t, self.item_bytes, self.most = t, item_bytes, most
        self.count = 0
        self.joined: list[Tensor] = []
        self.last: list[Tensor] = []  # after the first batch the same tensor as `joined`

    def add(self, number: int) -> None:
        """The logits of batch `number`, which was just computed."""
        place = (number - 1) % self.most + 1
        if place - 1 != self.count:  # batches that are not written out
            self.release()
            self.count, self.joined = place - 1, [self._of(place - 1)]
        new = self._of(1)
        if self.last != self.joined:
            self.t.free(*self.last)
        before, self.joined = self.joined, [self._of(place)] if self.count else [new]
        self.t.free(*before)
        self.count, self.last = place, [new]
        if place == self.most:
            self.release()

    def release(self) -> None:
        """All of it goes to the host."""
        self.t.free(*self.joined)
        if self.last != self.joined:
            self.t.free(*self.last)
        self.count, self.joined, self.last = 0, [], []

    def _of(self, batches: int) -> Tensor:
        return self.t.alloc("logits", self.t.size(batches * self.item_bytes, "B", "T", "V"))
