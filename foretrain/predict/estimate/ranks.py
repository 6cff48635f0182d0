"""What one rank of several keeps between micro-batches: its weights, its optimizer states, DDP's buckets. No torch.

The rank that is estimated is the one with the most to hold: rank 0 where weights are cut, since torch gives the first
ranks the larger pieces; with ZeRO-1, which deals out whole parameters, the one that is dealt the most.

torch/nn/parallel/distributed.py, torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from collections.abc import Sequence

from foretrain.base.units import MIB
from foretrain.model.ranks.sharing import Sharing
from foretrain.model.shape import Parameter
from foretrain.predict.timeline import Timeline

BUCKETS = "buckets"
# Weights go from the first rank to the others in copies of so many bytes, two at a time
# (torch/nn/parallel/distributed.py, broadcast_bucket_size; c10d/comm.cpp, broadcast_coalesced).
BROADCAST_BYTES, BROADCASTS = 250 * MIB, 2


class Rank:
    """What a rank holds of a model with these parameters; without `sharing` it is the only one, and holds all.

    `letters`: those of the formulas that are its own. `stepped`: the parameters that its optimizer has states of.
    """

    def __init__(self, sharing: Sharing | None, parameters: Sequence[Parameter]) -> None:
        self.sharing, self.parameters = sharing, tuple(parameters)
        self.letters: dict[str, int] = {}
        self.stepped = self.parameters
        if sharing and sharing.strategy == "zero1":
            self.stepped = max(dealt(self.parameters, sharing.world), key=_elements)
            self.letters["Z"] = _elements(self.stepped)

    def letter(self, letter: str) -> str:
        """The one that stands in the place of a letter of one card in what the optimizer stores."""
        return "Z" if letter == "P" and "Z" in self.letters else letter

    def wrapped(self, t: Timeline) -> None:
        """What wrapping a model leaves, and what it takes for a moment."""
        if self.sharing is None or self.sharing.way.shards_weights:
            return
        sizes = [4 * p.numel for p in self.parameters]
        for group in _in_groups(sizes, BROADCAST_BYTES):
            t.free(t.alloc("temporaries", t.size(sum(group))))
        t.alloc_all(BUCKETS, t.size(4, "P"), [sum(sizes)])  # one until the first step has shown the order


def dealt(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Whose optimizer states each rank has: of both of AdamW's groups the largest first, each to the rank with the
    fewest elements so far (ZeroRedundancyOptimizer._partition_parameters)."""
    found: list[list[Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for decayed in (True, False):
        group = [p for p in parameters if p.decayed is decayed]
        for parameter in sorted(group, key=lambda p: -p.numel):
            rank = sizes.index(min(sizes))
            found[rank].append(parameter)
            sizes[rank] += parameter.numel
    return found


def _elements(parameters: Sequence[Parameter]) -> int:
    return sum(p.numel for p in parameters)


def _in_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """As many in a row as reach the limit."""
    groups: list[list[int]] = [[]]
    for size in sizes:
        groups[-1].append(size)
        if sum(groups[-1]) >= limit:
            groups.append([])
    return [group for group in groups if group]
