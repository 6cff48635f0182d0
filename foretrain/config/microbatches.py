"""How a step's sequences are cut into micro-batches: divisors, so that each is in one, batch_size = auto, totals."""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig

AUTO = "auto"
BATCH, ACCUMULATION, TOTAL, SWITCH = (
    "batch_size", "gradient_accumulation_steps", "total_batch_size", "auto_batch_size"
)  # fmt: skip


def sequences_of(config: RunConfig) -> int:
    return config.batch_size * config.gradient_accumulation_steps


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def largest_divisor(number: int, most: int) -> int:
    return max(d for d in divisors(number) if d <= max(1, most))


def smaller_micro_batch(batch_size: int, sequences: int) -> int | None:
    return largest_divisor(sequences, batch_size // 2) if batch_size > 1 else None


def with_micro_batch(config: RunConfig, batch_size: int) -> RunConfig:
    """Return the same training with a micro-batch that divides a step's sequences; tokens and evaluation stay."""
    sequences = sequences_of(config)
    assert sequences % batch_size == 0
    made = config.model_copy(
        update={
            "batch_size": batch_size, "gradient_accumulation_steps": sequences // batch_size,
            "eval_sequences": config.eval_rows, "auto_batch_size": False,
        }
    )  # fmt: skip
    return in_parts(made)


def with_original_micro_batch(config: RunConfig, batch_size: int | None) -> RunConfig:
    """Return the same training with the micro-batch that it had before memory ran out (None: it never did)."""
    size = batch_size or config.batch_size
    update = {"batch_size": size, "gradient_accumulation_steps": max(1, sequences_of(config) // size)}
    return config.model_copy(update=update)


def in_parts(config: RunConfig) -> RunConfig:
    """Turn off updates in the backward pass where gradients of several micro-batches have to be summed."""
    if not config.optimizer_in_backward or config.gradient_accumulation_steps == 1:
        return config
    return config.model_copy(update={"optimizer_in_backward": False})


def accumulations(config: RunConfig, most: int) -> Iterator[dict[str, int]]:
    """Yield settings for 2, 4, … up to `most` times as many micro-batches, and so tokens; they end total_batch_size."""
    ended = {TOTAL: 0} if config.total_batch_size else {}
    times = 2
    while times <= most:
        yield {ACCUMULATION: times * config.gradient_accumulation_steps, **ended}
        times *= 2


def split_of(config: RunConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in (BATCH, ACCUMULATION, "eval_sequences", SWITCH)}


def says_auto(key: str, value: Any) -> bool:
    return key == BATCH and isinstance(value, str) and value.strip().lower() == AUTO


def layer_of(source: str) -> str:
    if source.startswith("-"):
        return "command line"
    path, _, line = source.rpartition(":")
    return path if line.isdigit() else source


def last_word(values: dict[str, Any], sources: dict[str, str], layers: Mapping[str, int]) -> None:
    """End auto by a later layer's batch_size, total_batch_size by its accumulation, eval_sequences by its eval_iters,
    in both dicts. `layers`: the number of the layer that a key was last set in."""
    for key, ended, off in ((BATCH, SWITCH, False), (ACCUMULATION, TOTAL, 0), ("eval_iters", "eval_sequences", 0)):
        if key in layers and ended in layers and layers[key] > layers[ended]:
            values[ended], sources[ended] = off, sources[key]


def accumulation_for_total(
    config: RunConfig, sources: Mapping[str, str], layers: Mapping[str, int]
) -> tuple[dict[str, int], UserError | None]:
    """Return (the options that follow from total_batch_size, what is wrong with it); a start for the pick where it is
    auto."""
    total, block, source = config.total_batch_size, config.block_size, sources.get(TOTAL, "default")
    if not total:
        return {}, None
    unit = block if config.auto_batch_size else block * config.batch_size
    if total % unit:
        nearest = [n for n in (total // unit * unit, (total // unit + 1) * unit) if n]
        what = "block_size" if config.auto_batch_size else "batch_size x block_size"
        return {}, UserError(
            "config.total_indivisible", total=total, what=what, unit=unit, source=source,
            nearest=[f"{n:,}" for n in nearest],
        )  # fmt: skip
    sequences = total // block
    batch = largest_divisor(sequences, config.batch_size)
    newest = max(layers.get(BATCH, -1), layers.get("block_size", -1))
    meant = layers.get(ACCUMULATION) == layers.get(TOTAL) and newest <= layers.get(TOTAL, -1)
    if meant and sequences_of(config) != sequences and not config.auto_batch_size:
        return {}, UserError(
            "config.total_contradicts", total=total, source=source, accumulation=config.gradient_accumulation_steps,
            batch_size=config.batch_size, block_size=block, product=config.tokens_per_step,
        )  # fmt: skip
    update = {BATCH: batch, ACCUMULATION: sequences // batch}
    return (update if batch == config.batch_size else {**update, "eval_sequences": config.eval_rows}), None
