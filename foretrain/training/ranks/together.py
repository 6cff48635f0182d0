"""What the ranks of a run do alike, for the trainer's loop: stop, take a smaller micro-batch, evaluate, compare.

Each step's loss is reduced over the ranks, and with it whether one of them has something to tell (Parallel.mean). Only
where one has do they confer, all after the same step; so a run in which nothing happens has no further collective.
"""

from collections.abc import Callable, Iterable, Iterator
from statistics import median_low
from typing import Any

import torch

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch
from foretrain.model.ranks.parallel import Share, sharer
from foretrain.model.ranks.sharing import Sharing
from foretrain.model.step import TrainState
from foretrain.training.attempts import Mean, Sum
from foretrain.training.ranks.group import Ranks
from foretrain.training.signals import StopFlag
from foretrain.training.store import RankFigures

SLOW = 0.15  # slower than the median by more is told


class Together:
    """The ranks at work. `smaller`: a micro-batch that this rank alone has taken, until all take it."""

    def __init__(self, ranks: Ranks, flag: StopFlag, note: Callable[..., None]) -> None:
        self.ranks, self.flag, self.note = ranks, flag, note
        self.smaller: int | None = None
        self.figures: tuple[RankFigures, ...] = ()
        self._evaluated_s, self._evaluated_tokens, self._evaluations = 0.0, 0, 0
        self._slow: set[int] = set()

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.ranks.world > 1

    def share(self, config: RunConfig) -> Share | None:
        """What shares the model among the ranks, for `build`."""
        place = self.ranks.place
        return sharer(Sharing(config.strategy, place.world, place.local_world)) if self.several else None

    def begin(self, state: TrainState) -> None:
        """Let each step ask whether this rank has something to tell."""
        if state.parallel:
            state.parallel.asks = lambda: bool(self.flag.asked) or self.smaller is not None

    def confer(self, batch_size: int) -> int:
        """The micro-batch that all go on with; where one of them was asked to stop, all are. Every rank calls this."""
        word = {"stop": self.flag.asked, "batch_size": self.smaller or batch_size}
        verdict = self.ranks.agree(word, _agreed)
        self.smaller = None
        if verdict["stop"]:
            self.flag.agree(verdict["stop"])
        return int(verdict["batch_size"])

    def pieces(self, batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
        """The micro-batches, each cut into pieces of so many rows where this rank has no memory for the whole."""
        for idx, targets in batches:
            yield from zip(idx.split(rows), targets.split(rows), strict=True)

    # -- evaluation ----------------------------------------------------------------------------------------

    def part(self, state: TrainState) -> tuple[int, int]:
        """(which, of how many) of an evaluation's batches this rank does: all, where each needs every rank."""
        shards = state.parallel is not None and state.parallel.sharing.way.shards_weights
        return (0, 1) if shards else (self.ranks.rank, self.ranks.world)

    def mean(self, own: Sum, device: torch.device) -> Mean:
        """The mean loss of what all ranks have evaluated; why there is none, where one of them has none."""
        if isinstance(own, tuple):
            total, weight = own
            if not self.several:
                return total / weight
        elif not self.several:
            return own
        else:
            total, weight = 0.0, 0.0
        words = (total, weight, float(own is None), float(own == "out of memory"))
        total, weight, stopped, failed = self.ranks.sums(words, device)
        if failed:
            return "out of memory"
        return None if stopped else total / weight

    def evaluated(self, seconds: float, tokens: int) -> None:
        """That this rank's part of an evaluation took so long, without the wait for the others."""
        self._evaluated_s, self._evaluated_tokens = self._evaluated_s + seconds, self._evaluated_tokens + tokens

    def gather(self, figures: RankFigures) -> None:
        """Let the first rank have the figures of all, and tell who is slow. After an evaluation, by every rank."""
        speed = self._evaluated_tokens / self._evaluated_s if self._evaluated_s else None
        self._evaluated_s, self._evaluated_tokens = 0.0, 0
        word = figures.model_copy(update={"evaluated_tokens_per_s": speed}).to_json()

        def keep(words: list[Any]) -> None:
            self.figures = tuple(RankFigures.model_validate(each) for each in words)
            self._evaluations += 1
            if self._evaluations > 1:  # the first one allocates, and compiles
                self._tell_slow()

        self.ranks.agree(word, keep)

    def _tell_slow(self) -> None:
        """Each once: a rank that computes slower than most holds up all."""
        speeds = {f.rank: f.evaluated_tokens_per_s for f in self.figures if f.evaluated_tokens_per_s}
        if not speeds:
            return
        usual_s = median_low(1 / speed for speed in speeds.values())
        for figures in self.figures:
            behind = 1 / speeds[figures.rank] / usual_s - 1 if figures.rank in speeds else 0.0
            if behind > SLOW and figures.rank not in self._slow:
                self._slow.add(figures.rank)
                self.note("slow_rank", rank=figures.rank, host=figures.host, card=figures.card, behind=behind)


def _agreed(words: list[dict[str, Any]]) -> dict[str, Any]:
    stop = next((word["stop"] for word in words if word["stop"]), "")
    return {"stop": stop, "batch_size": min(word["batch_size"] for word in words)}
