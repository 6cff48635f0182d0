"""How cards share a step: which options set it, and what each card holds."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from foretrain.base.errors import UserError
from foretrain.config.microbatches import divisors, largest_divisor, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig, StrategyName

# How a step's tokens are divided among ranks as in nanoGPT's train.py: world divides gradient_accumulation_steps.


def config_of_rank(config: RunConfig, world: int) -> RunConfig:
    """Return one rank's config. Raises UserError with the nearest that would do where ranks cannot share a step."""
    steps = config.gradient_accumulation_steps
    if steps % world:
        raise _indivisible(config, world)
    return config.model_copy(update={"gradient_accumulation_steps": steps // world})


def config_of_all_ranks(config: RunConfig, world: int) -> RunConfig:
    return config.model_copy(update={"gradient_accumulation_steps": config.gradient_accumulation_steps * world})


def recut(config: RunConfig, world: int) -> RunConfig | None:
    """Return the same tokens per step in the largest micro-batches that ranks share equally; None where they cannot."""
    sequences = sequences_of(config)
    return (
        None if sequences % world else with_micro_batch(config, largest_divisor(sequences // world, config.batch_size))
    )


def micro_batch_choices(config: RunConfig, world: int) -> list[RunConfig]:
    """Return a step's micro-batches for so many ranks, the largest first. Raises UserError where there are none."""
    config_of_rank(with_micro_batch(config, 1), world)
    return [with_micro_batch(config, batch) for batch in reversed(divisors(sequences_of(config) // world))]


def _indivisible(config: RunConfig, world: int) -> UserError:
    steps = config.gradient_accumulation_steps
    values = {"world": world, "accumulation": steps, "batch_size": config.batch_size, "tokens": config.tokens_per_step}
    if (smaller := recut(config, world)) is not None:
        split = {"new_batch": smaller.batch_size, "new_accumulation": smaller.gradient_accumulation_steps}
        return UserError("config.ranks_indivisible", **values, **split)
    near = [n for n in (steps // world * world, (steps // world + 1) * world) if n]
    a_micro_batch = config.tokens_per_step // steps
    found = [f"{n} ({n * a_micro_batch:,})" for n in near]
    return UserError("config.ranks_indivisible_near", **values, nearest=found)


def as_one_rank_of(config: RunConfig, world: int) -> RunConfig:
    """Return a start for the pick of batch_size = auto, for which any whole number of sequences a rank will do."""
    found = recut(config, world) if config.auto_batch_size else None
    return config if found is None else found.model_copy(update={"auto_batch_size": True})


# The ways to share a step. DDP: arXiv:2006.15704; ZeRO: arXiv:1910.02054; FSDP: arXiv:2304.11277 (FSDP2:
# torch/distributed/fsdp/_fully_shard).


@dataclass(frozen=True)
class Strategy:
    """`shards_weights`: a rank keeps its share of all; `reshards`: a block's weights are gathered again for backward;
    `replicates`: each node keeps a whole copy, cut among its own cards (HSDP)."""

    shards_weights: bool = False
    reshards: bool = False
    replicates: bool = False


STRATEGIES: dict[StrategyName, Strategy] = {
    "ddp": Strategy(),
    "zero1": Strategy(),  # the optimizer alone is shared
    "fsdp_no_reshard": Strategy(shards_weights=True),
    "fsdp": Strategy(shards_weights=True, reshards=True),
    "hsdp": Strategy(shards_weights=True, reshards=True, replicates=True),
}

HELD = "_held"  # behind the name of a strategy whose gradients are held back


def way_id(strategy: StrategyName, *, syncs_each: bool) -> str:
    return strategy if syncs_each else f"{strategy}{HELD}"


def of_one_strategy(ways: Collection[str]) -> bool:
    return len({way.removesuffix(HELD) for way in ways}) == 1


@dataclass(frozen=True)
class Sharing:
    """How a step is shared: the way, and the ranks. `per_node` is what HSDP cuts the weights into. `bucket_view`: DDP's
    gradients are views of its buckets (gradient_as_bucket_view), so they take no memory twice. `syncs_each`: FSDP
    reduces gradients in every micro-batch; else in the last one, and keeps them whole till then."""

    strategy: StrategyName
    world: int
    per_node: int
    bucket_view: bool = True
    syncs_each: bool = True

    @classmethod
    def of(cls, config: RunConfig, world: int, per_node: int) -> "Sharing":
        held = config.hold_gradients and STRATEGIES[config.strategy].shards_weights
        return cls(config.strategy, world, per_node, syncs_each=not held)

    @property
    def id(self) -> str:
        return way_id(self.strategy, syncs_each=self.syncs_each)

    @property
    def way(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def shards(self) -> int:
        if not self.way.shards_weights:
            return 1
        return self.per_node if self.way.replicates else self.world

    def share(self, shape: Sequence[int]) -> int:
        """Return the elements of a weight's largest piece: cut by rows, each rank has room for the first one's."""
        return -(-shape[0] // self.shards) * math.prod(shape[1:])


# Options whose optimizer works on weights that are whole.
_SHARDED = ("fsdp", "fsdp_no_reshard", "hsdp")
_WHOLE = {"muon": ("zero1", *_SHARDED), "adamw8bit": _SHARDED, "adamw4bit": _SHARDED}


def sharing_problem(config: RunConfig, sharing: Sharing) -> UserError | None:
    """Return why a step of this config cannot be shared so, as tried with model/step.py. Muon's matrices and blocks of
    8-bit and 4-bit moments are whole tensors; fp32 masters are made before DDP and FSDP change the weights. Copies to
    the host were tried on one card alone."""
    values = {"strategy": sharing.strategy}
    if sharing.way.replicates and sharing.world % sharing.per_node:
        return UserError("config.sharing_nodes", world=sharing.world, per_node=sharing.per_node)
    if sharing.strategy in _WHOLE.get(config.optimizer, ()):
        return UserError("config.sharing_optimizer", optimizer=config.optimizer, **values)
    if config.master_weights:
        return UserError("config.sharing_master_weights", **values)
    if config.optimizer_offload and sharing.strategy != "ddp":
        return UserError("config.sharing_offload", **values)
    if config.gradient_offload:  # model/master.py takes a gradient before DDP has summed it
        return UserError("config.sharing_gradients", **values)
    if config.checkpoint_offload:
        return UserError("config.sharing_checkpoints", **values)
    if config.optimizer_in_backward:  # so does model/in_backward.py, and updates its weight
        return UserError("config.sharing_in_backward", **values)
    return None


def check_ranks(config: RunConfig, world: int, per_node: int) -> None:
    config_of_rank(as_one_rank_of(config, world), world)
    if problem := sharing_problem(config, Sharing.of(config, world, per_node)):
        raise problem
