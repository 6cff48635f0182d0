"""What to change in a fine-tuning run, each change planned: memory, time, and whether it fits then."""

from collections.abc import Iterable, Iterator, Sequence

from foretrain.advice.finetune_together import everything, together
from foretrain.advice.finetune_tries import MILDER, OTHER, SAME, Tried, tried
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan, with_time
from foretrain.predict.memory import Verdict

NEAREST = 3  # changes that are named where none makes the run fit


class FineTuneChange(Record):
    """A change and what it comes to. `ids`: of its texts; `changed`: options with their new values; `longer`: of the
    time of a token, less where negative; None where the card's speed is not known."""

    ids: tuple[str, ...]
    changed: dict[str, bool | int | str]
    verdict: Verdict | None
    needed_bytes: int
    available_bytes: int | None
    saved_bytes: int
    longer: float | None
    learns_otherwise: bool  # what is trained is no longer the same


def changes(plan: FineTunePlan) -> tuple[FineTuneChange, ...]:
    """The changes that make a run fit, best first: those after which the same is learned, then the smallest, then by
    time. Others are looked at where none of those does so, alone or together. Where nothing fits, what comes nearest.
    """
    return list(search(plan))[-1]


def search(plan: FineTunePlan) -> Iterator[tuple[FineTuneChange, ...]]:
    """What `changes` has found so far, after each change that was planned: for who shows them as they come."""
    alone: list[Tried] = []
    found: list[FineTuneChange] = []
    whole: Tried | None = None
    for tries in (SAME, OTHER):
        for id in _strongest_first(tries):
            for each in (id, *MILDER.get(id, ())):
                change = tried(plan, (each,))
                alone += [change] if change else []
                fits = change is not None and change.fits
                found += [_of(plan, change)] if change and fits else []
                yield tuple(sorted(found, key=_rank))
                if each == id and not fits:
                    break
        if found:
            return
        every = everything(plan, alone)
        whole = every.whole or whole
        for change in together(plan, every):
            found += [_of(plan, change)] if change else []
            yield tuple(sorted(found, key=_rank))
        if found:
            return
    yield _nearest(plan, alone, whole)


def _strongest_first(tries: Iterable[str]) -> list[str]:
    """The changes but those that are milder than another of them."""
    milder = {id for each in MILDER.values() for id in each}
    return [id for id in tries if id not in milder]


def _nearest(plan: FineTunePlan, alone: Sequence[Tried], whole: Tried | None) -> tuple[FineTuneChange, ...]:
    """What comes nearest of single changes and of all together, `whole`: tight ones, then those that need least."""
    every = (*alone, *([whole] if whole else []))
    saving = [change for change in every if change.plan.needed_bytes < plan.needed_bytes]
    nearest = sorted(saving, key=lambda change: (change.plan.verdict != "tight", change.plan.needed_bytes))
    return tuple(_of(plan, change) for change in nearest[:NEAREST])


def planned(plan: FineTunePlan, ids: tuple[str, ...]) -> FineTuneChange | None:
    """The plan with these changes; None where one of them changes nothing, or the model cannot have it."""
    change = tried(plan, ids)
    return _of(plan, change) if change else None


def _of(plan: FineTunePlan, change: Tried) -> FineTuneChange:
    """What a change comes to."""
    longer, paged = None, str(change.changed.get("optim", "")).startswith("paged")  # how often it pages, nobody can say
    if plan.timing is not None and not paged:
        timing = with_time(change.plan, plan).timing
        longer = plan.timing.tokens_per_s / timing.tokens_per_s - 1 if timing else None
    other = change.plan
    return FineTuneChange(
        ids=change.ids, changed=change.changed, verdict=other.verdict, needed_bytes=other.needed_bytes,
        available_bytes=plan.available_bytes, saved_bytes=plan.needed_bytes - other.needed_bytes, longer=longer,
        learns_otherwise=_learns_otherwise(change),
    )  # fmt: skip


def _learns_otherwise(change: Tried) -> bool:
    return any(id in OTHER for id in change.ids)


def _rank(change: FineTuneChange) -> tuple[object, ...]:
    """Of changes that fit. One that gives up what an evaluation measures comes after those that do not."""
    return change.learns_otherwise, "loss_alone" in change.ids, len(change.ids), change.longer or 0.0
