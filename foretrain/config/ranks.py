"""How the tokens of a step are divided among ranks, one card each. They stay what the config says, on any number.

As nanoGPT does (train.py): each rank runs its share of the step's micro-batches. So the world size must divide
gradient_accumulation_steps.
"""

from foretrain.base.errors import UserError
from foretrain.config.microbatches import cut, divisors, largest_divisor, sequences_of
from foretrain.config.options import RunConfig


def of_rank(config: RunConfig, world: int) -> RunConfig:
    """The config of one of `world` ranks: as it is, but for the micro-batches that the other ranks run.

    Raises UserError with the nearest that would do where the ranks cannot share a step equally.
    """
    steps = config.gradient_accumulation_steps
    if steps % world:
        raise _indivisible(config, world)
    return config.model_copy(update={"gradient_accumulation_steps": steps // world})


def of_all(config: RunConfig, world: int) -> RunConfig:
    """The config of all `world` ranks, of that of one."""
    return config.model_copy(update={"gradient_accumulation_steps": config.gradient_accumulation_steps * world})


def recut(config: RunConfig, world: int) -> RunConfig | None:
    """The same tokens a step in micro-batches that so many ranks can share equally, as large as they are at most; None
    where they cannot share its sequences."""
    sequences = sequences_of(config)
    return None if sequences % world else cut(config, largest_divisor(sequences // world, config.batch_size))


def cuts(config: RunConfig, world: int) -> list[RunConfig]:
    """The micro-batches into which the ranks can cut a step, the largest first. Raises UserError where they cannot."""
    of_rank(cut(config, 1), world)
    return [cut(config, batch) for batch in reversed(divisors(sequences_of(config) // world))]


def _indivisible(config: RunConfig, world: int) -> UserError:
    """The same tokens a step by a smaller micro-batch where that is possible, else the nearest accumulations."""
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
    """With batch_size = auto any whole number of sequences a rank will do: the config as a start for the pick."""
    found = recut(config, world) if config.auto_batch_size else None
    return config if found is None else found.model_copy(update={"auto_batch_size": True})
