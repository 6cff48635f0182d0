"""The records of an outcome on several cards, beside the run as it is now."""

from foretrain.advice.ranks.planner import Outcome
from foretrain.advice.ranks.record import Way
from foretrain.advice.record import Effect, phase_effects
from foretrain.config.sharing import STRATEGIES


def way_of(outcome: Outcome) -> Way:
    """How the cards of an outcome share a step."""
    assert outcome.rank is not None
    return Way(strategy=outcome.rank.strategy, holds_gradients=not outcome.rank.syncs_each)


def shards(outcome: Outcome) -> bool:
    """Whether weights are cut among the cards."""
    return outcome.rank is not None and STRATEGIES[outcome.rank.strategy].shards_weights


def effect(now: Outcome, then: Outcome) -> Effect:
    """What a card needs and what all of them take; `slower` for a token."""
    old, new = now.timing, then.timing
    return Effect(
        needed_bytes=then.needed_bytes, saved_bytes=now.needed_bytes - then.needed_bytes,
        allocated_bytes=then.memory.worst.allocated_bytes, available_bytes=then.available_bytes, verdict=then.verdict,
        phases=phase_effects(now.memory, then.memory),
        step_s=new.step_s.expected_s if new else None, total_s=new.length_s.expected_s if new else None,
        slower=old.tokens_per_s / new.tokens_per_s - 1 if old and new else None,
        longer=new.length_s.expected_s / old.length_s.expected_s - 1 if old and new else None,
        money=then.money, source=then.memory.source,
    )  # fmt: skip
