"""What the ranks of a run do alike, for the trainer's loop: stop, take a smaller micro-batch, evaluate, compare.

Each step's loss is reduced over the ranks, and with it whether one of them has something to tell (Parallel.mean). Only
where one has do they confer, all after the same step; so a run in which nothing happens has no further collective.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from foretrain.base.signals import StopFlag
from foretrain.config.options import RunConfig
from foretrain.config.ranks import of_rank
from foretrain.data.batches import Batch
from foretrain.model.ranks.sharing import Sharing
from foretrain.model.ranks.streams import seeded
from foretrain.model.step import TrainState
from foretrain.training.attempts import Mean, Sum
from foretrain.training.ranks.group import Ranks
from foretrain.training.ranks.place import host_name, slow
from foretrain.training.store import RankFigures

if TYPE_CHECKING:
    from foretrain.model.ranks.parallel import Share

SLOW_TWICE = 2  # in so many evaluations, one after the other, before it is told


class Together:
    """The ranks at work. `smaller`: a micro-batch that this rank alone has taken, until all take it."""

    def __init__(self, ranks: Ranks, flag: StopFlag, note: Callable[..., None]) -> None:
        self.ranks, self.flag, self.note = ranks, flag, note
        self.smaller: int | None = None
        self.by_number = ranks.world > 1  # whether dropout draws by the number of a micro-batch
        self.figures: tuple[RankFigures, ...] = ()
        self._evaluated_s, self._evaluated_tokens = 0.0, 0
        self._slow: dict[int, int] = {}  # evaluations in which a rank was, one after the other

    @property
    def several(self) -> bool:
        return self.ranks.world > 1

    def part_of(self, config: RunConfig) -> RunConfig:
        """What this rank carries out of each step."""
        return of_rank(config, self.ranks.world) if self.several else config

    def share(self, config: RunConfig) -> "Share | None":
        """What shares the model among the ranks, for `build`."""
        if not self.several:
            return None
        # FSDP and what it imports take half a second and 50 MB, which a run of one rank has no use for.
        from foretrain.model.ranks.parallel import Share

        return Share(Sharing.of(config, self.ranks.place.world, self.ranks.place.local_world))

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

    def dealt(self, batches: Iterable[Batch], config: RunConfig, step: int) -> Iterable[Batch]:
        """The micro-batches of this rank's part of a step, as it carries them out. Dropout draws by their number in the
        whole step."""
        if config.dropout and self.by_number:
            batches = seeded(batches, config.seed, step, self.ranks.rank, self.ranks.world)
        return self._pieces(batches, self.smaller) if self.smaller else batches

    def _pieces(self, batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
        """Each cut into pieces of so many rows, where this rank has no memory for the whole."""
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
        update: dict[str, Any] = {"evaluated_s": self._evaluated_s, "evaluated_tokens": self._evaluated_tokens}
        update["host"] = host_name()
        self._evaluated_s, self._evaluated_tokens = 0.0, 0

        def keep(words: list[Any]) -> None:
            self.figures = tuple(RankFigures.model_validate(each) for each in words)
            for figures, behind in slow(self.figures):
                values = {"rank": figures.rank, "host": figures.host, "card": figures.card, "behind": behind}
                self._slow[figures.rank] = self._slow.get(figures.rank, 0) + 1
                if self._slow[figures.rank] == SLOW_TWICE:  # once may be chance, and the first one compiles
                    self.note("slow_rank", **values)

        self.ranks.agree(figures.model_copy(update=update).to_json(), keep)


def _agreed(words: list[dict[str, Any]]) -> dict[str, Any]:
    stop = next((word["stop"] for word in words if word["stop"]), "")
    return {"stop": stop, "batch_size": min(word["batch_size"] for word in words)}
