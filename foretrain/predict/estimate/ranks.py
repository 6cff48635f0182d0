"""What the rank with most (where weights are cut rank 0, with ZeRO-1 the one that is dealt the most) keeps between
micro-batches. No torch. torch/nn/parallel/distributed.py, torch/distributed/optim/zero_redundancy_optimizer.py."""

from collections.abc import Sequence

from foretrain.base.units import MIB
from foretrain.config.shape import ModelShape, Parameter
from foretrain.config.sharing import Sharing
from foretrain.predict.abstract.ranks import BUCKETS, FIRST_BUCKET_BYTES
from foretrain.predict.timeline import Size, Tensor, Timeline

BUCKET_BYTES = 25 * MIB  # torch/nn/parallel/distributed.py, bucket_cap_mb
# Weights go from the first rank to the others in copies of so many bytes, two at a time
# (torch/nn/parallel/distributed.py, broadcast_bucket_size; c10d/comm.cpp, broadcast_coalesced).
BROADCAST_BYTES, BROADCASTS = 250 * MIB, 2


class Buckets:
    """DDP's, of gradients in the order of parameters: of 25 MiB where it `looks_for_unused`; else one (`whole`) at
    first, then others in the order of gradients (reducer.cpp, rebuild_buckets)."""

    def __init__(
        self, t: Timeline, sizes: Sequence[int], whole: Size | None = None, *, looks_for_unused: bool = False
    ) -> None:
        self.t, self.sizes, self.whole, self.looks_for_unused = t, sizes, whole, looks_for_unused
        self.there: list[Tensor] = []

    def wrap(self, weights: Sequence[int]) -> None:
        """Send the weights, of so many bytes each, to the other ranks, and make the buckets."""
        for group in in_groups(weights, BROADCAST_BYTES):
            self.t.free(self.t.alloc("temporaries", self.t.size(sum(group))))
        # By size in the order of the model, and sent in the other one (_compute_bucket_assignment_by_size).
        sizes = [size for _, size in in_buckets(self.sizes)][::-1] if self.looks_for_unused else [sum(self.sizes)]
        self.there = [self.t.alloc(BUCKETS, self.whole or self.t.size(size)) for size in sizes]
        if self.looks_for_unused:
            self.t.alloc(BUCKETS, self.t.size(4 * len(self.sizes)))  # which parameters were used, on the device

    def rebuild(self, *, keeps: bool = False) -> list[Tensor]:
        """Recreate them after the first step. Returns the old ones where NCCL still has them: `keeps`."""
        if self.looks_for_unused or not self.there:
            return []
        old, sizes = self.there, [size for _, size in in_buckets(self.sizes[::-1])]
        if not keeps:
            self.t.free(*old)
        if self.whole:
            self.t.alloc_all(BUCKETS, self.whole, sizes)
        else:
            self.there = [self.t.alloc(BUCKETS, self.t.size(size)) for size in sizes]
        return old if keeps else []


class Rank:
    """What a rank holds of a model; without `sharing` all. `letters`: Pb and Pr, the weights of a block and around the
    blocks, with what is added to cut them; Sb, Sr and S, one piece of a block's, of the others and of all; Z, those
    whose states ZeRO-1 deals to it. `stepped`: what it changes."""

    def __init__(self, sharing: Sharing | None, shape: ModelShape) -> None:
        self.sharing = sharing
        self.parameters = list(shape.parameters())
        self.letters: dict[str, int] = {}
        self.pieces = [p.numel for p in self.parameters]  # of each weight that stays here
        self.stepped = list(zip(self.parameters, self.pieces, strict=True))
        self._buckets: Buckets | None = None
        self._groups: list[range] = []  # weights that are gathered together, by their places
        if sharing and sharing.way.shards_weights:
            self._cut(sharing, shape)
        elif sharing and sharing.strategy == "zero1":
            own = max(dealt(self.parameters, sharing.world), key=_elements)
            self.stepped = [(p, p.numel) for p in own]
            self.letters["Z"] = _elements(own)

    def _cut(self, sharing: Sharing, shape: ModelShape) -> None:
        self.pieces = [sharing.share(p.shape) for p in self.parameters]
        self.stepped = list(zip(self.parameters, self.pieces, strict=True))
        before, block = len(list(shape.family.before(shape.config))), len(shape.block_numels)
        first = sum(self.pieces[before : before + block])
        rest = sum(self.pieces) - shape.n_layer * first
        n = sharing.shards
        self.letters |= {"Pb": n * first, "Pr": n * rest, "Sb": first, "Sr": rest, "S": sum(self.pieces)}
        self._groups = [range(start, start + block) for start in range(before, before + shape.n_layer * block, block)]

    @property
    def weight(self) -> str:
        return "S" if "S" in self.letters else "P"

    def letter(self, letter: str) -> str:
        """The one that stands in the place of a letter of one card in what the optimizer stores."""
        return next((own for own in ("S", "Z") if own in self.letters), letter) if letter == "P" else letter

    def built(self, t: Timeline, widths: Sequence[int]) -> None:
        """The weights as they come to the device, one copy of each width; those that are cut come when they are."""
        if not self._groups:
            for width in widths:
                t.alloc_all("weights", t.size(width, "P"), [width * numel for numel in self.pieces])

    def wrapped(self, t: Timeline) -> None:
        """What wrapping the model leaves, and what it takes for a moment."""
        if self.sharing is None:
            return
        if self._groups:
            for group in self._groups:
                self._shard(t, group, "Sb")
            inside = {i for group in self._groups for i in group}
            self._shard(t, [i for i in range(len(self.parameters)) if i not in inside], "Sr")
            return
        sizes = [4 * p.numel for p in self.parameters]
        self._buckets = Buckets(t, sizes, t.size(4, "P"))
        self._buckets.wrap(sizes)

    def rebuilt(self, *, keeps: bool) -> list[Tensor]:
        """What is left of DDP's old bucket after the first step."""
        return self._buckets.rebuild(keeps=keeps) if self._buckets else []

    def _shard(self, t: Timeline, group: Sequence[int], letter: str) -> None:
        whole = [t.alloc("weights", t.size(4 * self.parameters[i].numel)) for i in group]
        t.alloc_all("weights", t.size(4, letter), [4 * self.pieces[i] for i in group])
        t.free(*whole)


def dealt(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Whose optimizer states each rank has: of both of AdamW's groups the largest first, each to the rank with the
    fewest elements so far (ZeroRedundancyOptimizer._partition_parameters)."""
    found: list[list[Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for decayed in (True, False):
        group = [p for p in parameters if p.decayed is decayed]
        for place, rank in deal([p.numel for p in group], sizes):
            found[rank].append(group[place])
    return found


def deal(numels: Sequence[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Return (which tensor, the rank that it goes to): the largest first, to the least of `sizes`, which grows."""
    found = []
    for place in sorted(range(len(numels)), key=lambda i: -numels[i]):
        rank = sizes.index(min(sizes))
        sizes[rank] += numels[place]
        found.append((place, rank))
    return found


def _elements(parameters: Sequence[Parameter]) -> int:
    return sum(p.numel for p in parameters)


def in_buckets(sizes: Sequence[int], most: int = BUCKET_BYTES) -> list[tuple[int, int]]:
    """Return (the last gradient, bytes) of each of DDP's buckets, a small one first; `most`: bytes of others."""
    found, limit, now = [], FIRST_BUCKET_BYTES, 0
    for place, size in enumerate(sizes):
        now += size
        if now >= limit:
            found.append((place, now))
            limit, now = most, 0
    return [*found, (len(sizes) - 1, now)] if now else found


def in_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """As many in a row as reach the limit."""
    groups: list[list[int]] = [[]]
    for size in sizes:
        groups[-1].append(size)
        if sum(groups[-1]) >= limit:
            groups.append([])
    return [group for group in groups if group]
