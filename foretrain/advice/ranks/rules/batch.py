"""How the ranks' step is cut into micro-batches, and how many tokens it has."""

from collections.abc import Sequence

from foretrain.advice.ranks.rules.base import Change, Rule, State
from foretrain.config.microbatches import accumulations, divisors, sequences_of, split_of, with_micro_batch

MOST_TIMES = 16


def _recut(state: State, batch: int) -> Change:
    fewer = {"eval_batch_size": 0} if state.config.eval_batch_size > batch else {}
    return Change({**split_of(with_micro_batch(state.config, batch)), **fewer})


def _batches(state: State) -> list[int]:
    """Micro-batches into which the ranks can cut the same step, rising."""
    return divisors(sequences_of(state.config) // state.cluster.world)


def smaller(state: State, way: str) -> Sequence[Change]:
    """Every smaller one, the largest first."""
    return [_recut(state, each) for each in reversed(_batches(state)) if each < state.config.batch_size]


def larger(state: State, way: str) -> Sequence[Change]:
    now = state.config.batch_size
    return [_recut(state, each) for each in _batches(state) if now < each <= MOST_TIMES * now]


def accumulation(state: State, way: str) -> Sequence[Change]:
    """Twice, four times, … as many micro-batches, and so tokens a step: gradients are summed as much less often."""
    return [Change({**more}) for more in accumulations(state.config, MOST_TIMES)]


RULES = (
    Rule(
        "micro_batch", "memory", "exact", "docs/budget.md", smaller,
        lambda state, way: "" if state.config.batch_size > 1 else "smallest", redraws=True, place=20,
    ),
    Rule(
        "larger_micro_batch", "speed", "exact", "docs/several-cards.md", larger, redraws=True, place=21,
    ),
    Rule(
        "more_accumulation", "speed", "other tokens", "docs/several-cards.md; arXiv:1812.06162", accumulation,
        place=60,
    ),
)  # fmt: skip
