"""Several cards that fine-tune one model with DDP, as transformers' Trainer wraps it: memory and waiting of a rank.

torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp: gradients are summed in buckets, which are
tensors beside them (gradient_as_bucket_view is off). The Trainer looks for unused parameters with adapters, and
without checkpointing (trainer.py, `find_unused_parameters`): then buckets are of 25 MiB from the start, and stay. Else
there is one at first, and after the first step those of 25 MiB in its place. LLaMA-Factory does not look with adapters.
"""

from collections.abc import Iterator
from itertools import accumulate

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import WRAPPED, FineTune
from foretrain.config.sharing import Sharing
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import Cluster, cluster_of
from foretrain.hardware.devices import Context
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.ranks import BUCKETS
from foretrain.predict.estimate.ranks import BROADCAST_BYTES, in_buckets, in_groups
from foretrain.predict.ranks import NcclMemory
from foretrain.predict.speed.collectives import collective_time
from foretrain.predict.speed.ranks import scenarios, waits_for_sums_s
from foretrain.predict.timeline import Tensor, Timeline


def cards_of(tune: FineTune, gpu: Gpu) -> Cluster | None:
    """Return the cards that train together; None of one alone. Raises UserError for what no cards can be, and for a
    loop that does not wrap the model in DDP."""
    if tune.world == 1:
        return None
    if tune.loop not in WRAPPED:
        raise UserError("usage.finetune_without.ddp_loop", loop=tune.loop, world=tune.world)
    return cluster_of(gpu, tune.world, tune.per_node, tune.link, tune.network)


def context_of(tune: FineTune, gpu: Gpu) -> Context:
    """Return what a rank takes on its card beside the allocator: the CUDA context, and NCCL's own memory."""
    cards, context = cards_of(tune, gpu), Context.of(gpu)
    if cards is None:
        return context
    sharing = Sharing("ddp", cards.world, cards.per_node, bucket_view=False)
    return NcclMemory.of(cards, sharing).beside(context)


class Buckets:
    """DDP's buckets in a simulated run. `trained`: the parameters in the order in which the model has them."""

    def __init__(self, tune: FineTune, trained: list[Parameter], t: Timeline) -> None:
        self.sizes = [p.numel() * p.dtype.itemsize for p in trained] if tune.world > 1 else []
        self.looks_for_unused = tune.loop != "llama-factory" if tune.adapters else not tune.gradient_checkpointing
        self.t = t
        self.there: list[Tensor] = []

    def wrap(self, weights: list[int]) -> None:
        """Send the weights, of so many bytes each, to the other ranks, and make the buckets."""
        for group in in_groups(weights, BROADCAST_BYTES):
            self.t.free(self.t.alloc("temporaries", self.t.size(sum(group))))
        # By size in the order of the model, and sent in the other one (_compute_bucket_assignment_by_size).
        self._make([size for _, size in in_buckets(self.sizes)][::-1] if self.looks_for_unused else [sum(self.sizes)])
        if self.looks_for_unused:
            self.t.alloc(BUCKETS, self.t.size(4 * len(self.sizes)))  # which parameters were used, on the device

    def rebuild(self) -> None:
        """Make them anew after the first step, in the order in which gradients came."""
        if self.sizes and not self.looks_for_unused:
            self.t.free(*self.there)
            self._make([size for _, size in in_buckets(self.sizes[::-1])])

    def _make(self, sizes: list[int]) -> None:
        self.there = [self.t.alloc(BUCKETS, self.t.size(size)) for size in sizes]


def waits_s(tune: FineTune, gpu: Gpu, sizes: list[int], backward_s: float) -> Iterator[float]:
    """Yield the seconds that a step waits for others: with fast, usual and slow links.

    `sizes`: bytes of the trained parameters; their gradients are ready at even distances of the last micro-batch's
    backward pass, since blocks are alike. The last bucket is always waited for.
    """
    cards = cards_of(tune, gpu)
    if cards is None:
        yield from (0.0, 0.0, 0.0)
        return
    buckets = [size for _, size in in_buckets(sizes[::-1])]
    full = [(backward_s * done / sum(sizes), size) for done, size in zip(accumulate(buckets), buckets, strict=True)]
    for groups, factor in scenarios(cards):
        yield waits_for_sums_s(
            full, backward_s, lambda what, size, on=groups["all"], x=factor: x * collective_time(what, size, on).seconds
        )
