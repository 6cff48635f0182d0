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


def cuts(config: RunConfig, world: int) -> list[RunConfig]:
    """The micro-batches into which the ranks can cut a step, the largest first. Raises UserError where they cannot."""
    of_rank(cut(config, 1), world)
    return [cut(config, batch) for batch in reversed(divisors(sequences_of(config) // world))]


def _indivisible(config: RunConfig, world: int) -> UserError:
    """The same tokens a step by a smaller micro-batch where that is possible, else the nearest accumulations."""
    steps, batch, sequences = config.gradient_accumulation_steps, config.batch_size, sequences_of(config)
    values = {"world": world, "accumulation": steps, "batch_size": batch, "tokens": config.tokens_per_step}
    if sequences % world == 0:
        smaller = largest_divisor(sequences // world, batch)
        split = {"new_batch": smaller, "new_accumulation": sequences // smaller}
        return UserError("config.ranks_indivisible", **values, **split)
    near = [n for n in (steps // world * world, (steps // world + 1) * world) if n]
    a_micro_batch = config.tokens_per_step // steps
    found = [f"{n} ({n * a_micro_batch:,})" for n in near]
    return UserError("config.ranks_indivisible_near", **values, nearest=found)


def as_one_rank_of(config: RunConfig, world: int) -> RunConfig:
    """With batch_size = auto any whole number of sequences a rank will do: the config as a start for the pick."""
    sequences = sequences_of(config)
    if not config.auto_batch_size or sequences % world:
        return config
    return cut(config, largest_divisor(sequences // world, config.batch_size)).model_copy(
        update={"auto_batch_size": True}
    )
