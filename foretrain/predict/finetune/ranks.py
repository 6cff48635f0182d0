"""Several cards that fine-tune one model, as transformers' Trainer shares it: memory and waiting of a rank.

DDP (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp): gradients are summed in buckets, which
are tensors beside them (gradient_as_bucket_view is off). The Trainer looks for unused parameters with adapters, and
without checkpointing (trainer.py, `find_unused_parameters`); LLaMA-Factory does not look with adapters.

FSDP2 (accelerate utils/fsdp_utils.py, fsdp2_prepare_model; transformers 5.23, accelerate 1.15): each layer is a group,
so is the embedding, and so are the last norm and the head, with the embedding where it is tied; these stay gathered
between the passes. There is no autocast: with bf16 or fp16 all is gathered in that dtype, what is trained is kept in
fp32, and gradients are summed in half precision. With accumulation they stay whole until the last micro-batch.

ZeRO is DeepSpeed's (0.19.6, runtime/zero/stage_1_and_2.py and stage3.py, runtime/engine.py): the model is in half
precision without autocast; what is trained has an fp32 copy and fp32 moments, each cut by the cards. Nothing of it is
measured here, and how large its buffers are its JSON says, so memory is a range (`Zero`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import WRAPPED, FineTune
from foretrain.config.sharing import Sharing
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import Cluster, cluster_of
from foretrain.hardware.devices import Context
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.fully_shard import FullyShard, Group
from foretrain.predict.abstract.passage import OUTSIDE
from foretrain.predict.estimate.ranks import in_buckets
from foretrain.predict.ranks import context_beside
from foretrain.predict.speed.ranks import Pace, Unit, scenario_times, shared_passes_s, waits_for_sums_s

SHARDED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch")  # whose states are cut as the weights are
# Families whose last norm is found under peft, too: the others' model has the name of the part that is looked in.
NORM_IN_HEAD = ("gpt2", "gpt_bigcode", "gpt_neox", "falcon")


def cards_of(tune: FineTune, gpu: Gpu) -> Cluster | None:
    """Return the cards that train together; None of one alone. Raises UserError where they cannot share the run."""
    if tune.world == 1:
        return None
    if tune.loop not in WRAPPED:
        raise UserError("usage.finetune_without.ddp_loop", loop=tune.loop, world=tune.world)
    if problem := _problem(tune, gpu):
        raise not_planned(tune, problem)
    return cluster_of(gpu, tune.world, tune.per_node, tune.link, tune.network)


def _problem(tune: FineTune, gpu: Gpu) -> str:
    """Return the setting with which a run is not planned with its strategy."""
    fsdp, cut = not tune.zero_stage, tune.sharded
    asks = {
        f"loop = {tune.loop}": fsdp and tune.loop not in ("trainer", "trl"),
        f"method = {tune.method}": cut and tune.method == "qlora",
        "load_in_8bit": cut and tune.load_in_8bit, "unsloth": tune.unsloth, "use_liger_kernel": cut and tune.liger,
        "torch_compile": tune.compile, "use_reentrant": fsdp and tune.gradient_checkpointing and tune.reentrant,
        "modules_to_save": cut and bool(tune.lora_saved), f"optim = {tune.optim}": tune.optim not in SHARDED_OPTIMIZERS,
        f"training = {tune.training}": fsdp and tune.scores > 0, gpu.name: gpu.kind != "cuda",
        "fine-tuning": tune.strategy == "hsdp",
    }  # fmt: skip
    return next((what for what, on in asks.items() if on), "") if tune.strategy != "ddp" else ""


def not_planned(tune: FineTune, what: str) -> UserError:
    return UserError("usage.finetune_without.strategy", strategy=tune.strategy, what=what)


def sharing_of(tune: FineTune, cards: Cluster) -> Sharing:
    each = bool(tune.zero_stage)  # sums gradients in every micro-batch
    return Sharing(tune.way, cards.world, cards.per_node, bucket_view=False, syncs_each=each)


VLLM_BYTES = (1 << 29, 1 << 31)  # of CUDA graphs, expected and at most: its logs say 0.2 to 2 GiB; not measured here


def context_of(tune: FineTune, gpu: Gpu) -> Context:
    """Return a rank's memory beside the allocator: the CUDA context, NCCL's, and vLLM's CUDA graphs."""
    found = context_beside(cards_of(tune, gpu), tune.way, gpu)
    if not tune.generates or tune.vllm != "colocate":
        return found
    more = {"expected_bytes": found.expected_bytes + VLLM_BYTES[0], "high_bytes": found.high_bytes + VLLM_BYTES[1]}
    return found.model_copy(update=more)


class Shards(FullyShard):
    """FSDP2 as accelerate wraps a model. `stored`: bytes of an element between passes; `norm_in_head`: it is found."""

    adds, waits = True, False

    def __init__(self, sharing: Sharing, stored: Callable[[Parameter], int], *, norm_in_head: bool) -> None:
        self.sharing, self.stored, self.norm_in_head, self.widens = sharing, stored, norm_in_head, False
        self.open: list[Group] = []  # groups whose forward pass has begun

    def share(self, model: Any) -> list[Group]:
        """Return the groups in the order in which they are cut."""
        embedding, head, tied = model.embed_tokens, model.lm_head, model.facts.tied
        norms = [model.norm] if self.norm_in_head else []
        reshards = self.sharing.way.reshards
        layers = [self._group(layer.parameters(), i, reshards=reshards) for i, layer in enumerate(model.layers)]
        parts = [*norms, *([embedding] if tied else []), head]
        self.tail = self._group((p for part in parts for p in part.parameters()), OUTSIDE)
        first = [] if tied else [self._group(embedding.parameters(), OUTSIDE, reshards=reshards)]
        inside = {id(p) for group in (*layers, *first, self.tail) for p in group.parameters}
        rest = [p for p in model.parameters() if id(p) not in inside]
        self.root = self._group(rest, OUTSIDE) if rest else None
        around = [self.root] if self.root else []
        self.groups = [*first, *layers, *([] if tied else [self.tail])]
        self._own(*around, *([self.tail] if tied else []))
        self.modules = dict(zip([*map(id, first), *map(id, layers)], [embedding, *model.layers][tied:], strict=True))
        self.ends = (embedding if tied else model.norm if norms else head), head
        return [*layers, *first, self.tail, *around]

    def _group(self, parameters: Iterable[Parameter], layer: int, *, reshards: bool = False) -> Group:
        unique = list({id(p): p for p in parameters}.values())
        found, shards = Group(unique, self.sharing, layer, reshards=reshards), self.sharing.shards
        found.widths = [p.dtype.itemsize for p in unique]
        sizes = list(zip(unique, found.widths, found.sizes, strict=True))
        cast = sum(width * size for p, width, size in sizes if self.stored(p) != width) // shards
        sent = sum(width * size for p, width, size in sizes if p.requires_grad)
        kept = sum(self.stored(p) * size for p, _, size in sizes if p.requires_grad) // shards
        found.cast = (cast,) if cast else None
        found.gathered, found.sent, found.summed = (sum(w * size for _, w, size in sizes),), (sent,), (sent // shards,)
        found.kept = (kept,) if kept != sent // shards else None
        return found

    def wrap(self, model: Any, machine: m.Machine) -> None:
        self.on = machine
        self.share(model)
        for group in self.groups:
            if id(group) in self.modules:
                module = self.modules[id(group)]
                module.forward = partial(self._forward, group, module.forward)
        first, last = self.ends
        first.forward = partial(self._first, first.forward)
        last.forward = partial(self._last, last.forward)
        model.forward = partial(self._around, model.forward)

    def _first(self, forward: Callable[..., Any], *args: Any) -> Any:
        return forward(*self._enter(self.tail, args))

    def _last(self, forward: Callable[..., Any], *args: Any) -> Any:
        return self._leave(self.tail, forward(*args))

    def _around(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run the whole model, whose loss may read the head's weight without running the head."""
        if self.root:
            self._enter(self.root, args)
        out = super()._around(forward, *args, **named)
        for group in list(self.open):
            out = self._leave(group, out)
        return out

    def _enter(self, group: Group, args: Sequence[Any]) -> Sequence[Any]:
        self.open.append(group)
        return super()._enter(group, args)

    def _leave(self, group: Group, out: Any) -> Any:
        self.open.remove(group)
        return super()._leave(group, out)


# Elements of DeepSpeed's buckets where its JSON says nothing (runtime/zero/config.py: reduce_bucket_size and
# stage3_max_live_parameters). transformers makes "auto" the square of the model's width, which is less.
BUCKET, MOST_LIVE = 500_000_000, 1_000_000_000


class Zero(NamedTuple):
    """Elements that decide what DeepSpeed holds on one of `world` cards: of the model, of what is trained, of the
    largest weight of all, of a layer's and of what is trained; `width` of the model. `item_bytes`: of a weight."""

    stage: int
    world: int
    accumulates: bool
    item_bytes: int
    total: int
    trained: int
    largest: int
    largest_inside: int
    largest_trained: int
    width: int

    @property
    def own(self) -> int:
        return -(-self.trained // self.world)

    @property
    def bucket_bytes(self) -> int:
        return self.item_bytes * min(self.width**2, BUCKET)

    @property
    def live_bytes(self) -> int:
        """What is gathered while a layer runs, at least."""
        return self.item_bytes * self.largest_inside if self.stage == 3 else 0

    @property
    def more_bytes(self) -> int:
        """How much more than that a step can take: buckets of the default size, with overlap_comm two; copies of one
        while it is summed, or of a gradient that none holds; gradients before they are fp32, copied and as a whole;
        and in stage 3 all that may stay gathered, and fp32 gradients."""
        buckets = (1 if self.stage == 3 else 2) * self.item_bytes * BUCKET - self.bucket_bytes
        copies = self.item_bytes * max(self.largest_trained, min(self.trained, BUCKET))
        if self.stage == 3:
            live = self.item_bytes * min(self.total, MOST_LIVE + self.largest) - self.live_bytes
            return buckets + copies + live + 4 * self.own
        whole = self.trained if self.stage == 1 and not self.accumulates else 0
        return buckets + copies + self.item_bytes * (2 * self.own + whole)


Weight = tuple[int, tuple[int, ...], int, bool]  # of a traced model: (layer, shape, item bytes, whether it is trained)


def groups_of(tune: FineTune, weights: Sequence[Weight]) -> list[Group]:
    """Return what FSDP2 gathers of a traced model: its layers, and what is of none, which stays gathered."""
    sharing, gathered, sent = Sharing(tune.way, tune.world, tune.world), Counter[int](), Counter[int]()
    for layer, shape, width, trained in weights:
        size = sharing.share(shape or (1,)) * tune.world * (width if tune.amp == "no" else min(2, width))
        gathered[layer] += size
        sent[layer] += size * trained
    found: list[Group] = []
    for layer in sorted(gathered, key=lambda layer: (layer == OUTSIDE, layer)):
        found.append(Group((), sharing, layer, reshards=sharing.way.reshards and layer != OUTSIDE))
        found[-1].number, found[-1].gathered, found[-1].sent = len(found), (gathered[layer],), (sent[layer],)
    return found


def waits_s(
    tune: FineTune, gpu: Gpu, sizes: Sequence[int], pace: Pace, groups: Sequence[Group] = ()
) -> Iterator[float]:
    """Yield the seconds that a step waits for others: with fast, usual and slow links. `sizes`: bytes of the trained
    parameters, in DDP; their gradients are ready at even distances of the last micro-batch's backward pass, since
    blocks are alike. The last bucket is always waited for. `groups`: FSDP's."""
    cards, ordered = cards_of(tune, gpu), sorted(groups, key=lambda group: group.number)
    buckets = [size for _, size in in_buckets(sizes[::-1])]
    full = [(pace.backward * n / sum(sizes), size) for n, size in zip(accumulate(buckets), buckets, strict=True)]

    def unit(group: Group, *, sums: bool) -> Unit:
        seconds = (pace.forward_block, pace.backward_block) if group.layer != OUTSIDE else (0.0, 0.0)
        if group is ordered[-1]:
            seconds = pace.forward_root, pace.backward_root
        return Unit(group.gathered[0], group.sent[0] if sums else 0, *seconds, group.reshards, group.is_outer)

    for i, times in enumerate(scenario_times(cards) if cards else ()):
        if not groups:
            if not tune.zero_stage:
                yield waits_for_sums_s(full, pace.backward, times)
                continue
            # Beside the backward pass with overlap_comm, which DeepSpeed has by default in stage 3 alone. Stage 1 sums
            # once a step. Then each card sends its part of the new weights.
            summed = waits_for_sums_s(
                full if i == 0 else [(0.0, size) for size in buckets], pace.backward * (i == 0), times
            )
            yield summed * (tune.grad_accum if tune.zero_stage == 2 else 1) + times("all_gather", sum(sizes))
            continue
        last, before = (
            shared_passes_s([unit(group, sums=sums) for group in ordered], times) - pace.forward - pace.backward
            for sums in (True, False)
        )
        yield last + (tune.grad_accum - 1) * (last if tune.zero_stage else before)
