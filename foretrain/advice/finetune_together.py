"""The smallest combinations of changes that make a run fit; of generating text they are a change of their own.

All of them together first: where not even that fits, nothing does. Then all but one: those without which it does not
fit are part of every combination that does, as long as a change that saves memory alone costs none beside others. So
few combinations are left to plan.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from foretrain.advice.finetune_tries import ALONE
from foretrain.advice.tries import SearchedPlan, Tried, tried
from foretrain.predict.finetune.memory import PHASES

MOST_TOGETHER = 2  # combinations that are looked for
MOST_PLANNED = 6  # combinations of one search that are planned, before one is made smaller change by change


class Everything(NamedTuple):
    """Changes that save anything, of these the strongest for each option, and the run with all of the strongest: None
    where they are not several."""

    helpful: list[Tried]
    strongest: list[Tried]
    whole: Tried | None


def together(plan: SearchedPlan, found: Everything) -> Iterator[Tried | None]:
    """Combinations of the smallest size that fit, best guess first; None after each plan that is not one. `found`: of
    changes none of which fits by itself."""
    helpful, strongest, whole = found
    yield None
    if whole is None or not whole.fits:
        return
    needed: list[Tried] = []
    for change in strongest:
        rest = _planned(plan, [other for other in strongest if other is not change])
        yield None
        if rest is None or not rest.fits:
            needed.append(change)
    left = MOST_PLANNED
    for size in range(max(2, len(needed)), len(strongest)):
        fitted = 0
        for some in _combinations(plan, helpful, needed, size)[:left]:
            left -= 1
            fitting = _planned(plan, some)
            good = fitting is not None and fitting.fits
            fitted += good
            yield fitting if good else None
            if fitting is not None and fitted == 1 and good:
                yield from _milder(plan, fitting)
            if fitted == MOST_TOGETHER:
                return
        if fitted:
            return
    yield from _reduced(plan, whole, strongest)


def everything(plan: SearchedPlan, alone: Sequence[Tried]) -> Everything:
    """All that helps, together; without changes that cost memory in another phase, where it does not fit with them. Of
    changes that set the same option the last is strongest."""
    before = _phases(plan)
    beside = [change for change in alone if change.ids[0] not in ALONE]
    effects = [
        (change, [after - size for after, size in zip(_phases(change.plan), before, strict=True)]) for change in beside
    ]
    helpful = [change for change, effect in effects if min(effect) < 0]
    harmless = [change for change, effect in effects if min(effect) < 0 and max(effect) <= 0]
    found: list[Everything] = []
    for some in (helpful, harmless):
        strongest: list[Tried] = []
        for change in some:
            kept = [other for other in strongest if not other.clashes(change) and not other.is_part_of(change)]
            strongest = [*kept, change]
        whole = _planned(plan, strongest) if len(strongest) > 1 else None
        found.append(Everything(some, strongest, whole))
        if (whole is not None and whole.fits) or len(harmless) == len(helpful):
            return found[-1]
    return min(found, key=lambda each: each.whole.plan.needed_bytes if each.whole else math.inf)


def _phases(plan: SearchedPlan) -> list[int]:
    """Bytes of tensors in each phase. Preparing and merging are of adapters alone: 0 without."""
    sizes = {phase.phase: phase.allocated_bytes for phase in plan.memory.phases}
    return [sizes.get(name, 0) for name in PHASES]


def _planned(plan: SearchedPlan, some: Sequence[Tried]) -> Tried | None:
    return tried(plan, tuple(id for change in some for id in change.ids))


def _combinations(
    plan: SearchedPlan, helpful: Sequence[Tried], needed: Sequence[Tried], size: int
) -> list[tuple[Tried, ...]]:
    """Those of so many changes with the needed ones, or what sets the same option more gently; the most promising ones
    first."""
    gentle = [[other for other in helpful if other is one or other.clashes(one)] for one in needed]
    free = [change for change in helpful if not any(change in group for group in gentle)]
    extra = list(combinations(free, size - len(needed)))
    found = [(*some, *more) for some, more in product(product(*gentle), extra)]
    found = [some for some in found if not any(one.clashes(other) for one, other in combinations(some, 2))]
    guessed = sorted(((_guess(plan, some), some) for some in found), key=lambda pair: pair[0])
    return [some for guess, some in guessed if guess <= (plan.available_bytes or 0)]


def _guess(plan: SearchedPlan, some: Sequence[Tried]) -> float:
    """Bytes of tensors of the worst phase, if each change saved its share of what others leave, or its bytes."""
    worst = 0.0
    sizes = [_phases(change.plan) for change in some]
    for i, before in enumerate(_phases(plan)):
        share = bytes_left = float(before)
        for each in sizes:
            share *= each[i] / before if before else 1.0
            bytes_left -= before - each[i]
        worst = max(worst, min(share, bytes_left))
    return worst


def _reduced(plan: SearchedPlan, whole: Tried, strongest: Sequence[Tried]) -> Iterator[Tried | None]:
    """All together without each that is not missed, the last first."""
    kept, found = list(strongest), whole
    for change in reversed(strongest):
        fewer = _planned(plan, [other for other in kept if other is not change])
        yield None
        if fewer is not None and fewer.fits:
            kept, found = [other for other in kept if other is not change], fewer
    yield found
    yield from _milder(plan, found)


def _milder(plan: SearchedPlan, found: Tried) -> Iterator[Tried | None]:
    """The same with one of its changes milder, while it fits."""
    for ids in found.milder:
        mild = tried(plan, ids)
        good = mild is not None and mild.fits
        yield mild if good else None
        if not good:
            return
