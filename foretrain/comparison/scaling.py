"""What more cards bring: tokens a second of all, of each card, and what of the cards' number that is.

Only a run on other cards of the same kind, of the same model, tells how training scales. Ranks on a CPU share its
cores, so more of them are not more hardware.
"""

from collections.abc import Sequence
from typing import Literal

from foretrain.base.records import Record
from foretrain.comparison.subject import Subject

Why = Literal["", "one_processor", "other_cards", "other_models", "other_program", "no_speed"]


class Scaling(Record):
    """`more` has more cards than `fewer` (or ranks, on one processor), which are their labels.

    `efficiency`: the speed-up by the ratio of the cards; None where it says nothing, which is `why`. `predicted`:
    whether one of the speeds is. `same_tokens`: whether their steps have as many tokens.
    """

    more: str
    fewer: str
    more_ranks: int
    fewer_ranks: int
    more_cards: int
    fewer_cards: int
    same_tokens: bool
    speed_up: float | None = None
    efficiency: float | None = None
    predicted: bool = False
    why: Why = ""


def scalings(subjects: Sequence[Subject]) -> tuple[Scaling, ...]:
    """Of each other subject with the first, where both say how many ranks they have, and not as many."""
    first, *others = subjects
    pairs = ((first, other) for other in others if first.world and other.world and first.world != other.world)
    return tuple(_scaling(one, other) for one, other in pairs)


def _scaling(one: Subject, other: Subject) -> Scaling:
    more, fewer = (one, other) if (one.devices, one.world) > (other.devices, other.world) else (other, one)
    quick, slow = more.tokens_per_s, fewer.tokens_per_s
    why = _why(more, fewer)
    speed_up = quick / slow if quick and slow and not why else None
    return Scaling(
        more=more.label, fewer=fewer.label, more_ranks=more.world or 1, fewer_ranks=fewer.world or 1,
        more_cards=more.devices, fewer_cards=fewer.devices, same_tokens=more.tokens_per_step == fewer.tokens_per_step,
        speed_up=speed_up, efficiency=speed_up * fewer.devices / more.devices if speed_up else None,
        predicted=not (more.measured and fewer.measured), why=why,
    )  # fmt: skip


def _why(more: Subject, fewer: Subject) -> Why:
    """Why the two say nothing of how training scales; empty where they do."""
    if more.gpu is None or fewer.gpu is None or more.gpu.name != fewer.gpu.name:
        return "other_cards"
    if more.devices == fewer.devices:
        return "one_processor"
    if more.flops_per_token != fewer.flops_per_token:
        return "other_models"
    if more.step != fewer.step:
        return "other_program"
    return "" if more.tokens_per_s and fewer.tokens_per_s else "no_speed"
