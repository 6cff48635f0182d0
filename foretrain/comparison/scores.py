"""What `foretrain eval` found of the runs that are compared, side by side."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from foretrain.base.records import Record
from foretrain.comparison.subject import Subject
from foretrain.evaluation.record import Scores, TaskScore, TextScore

# Of a difference of two figures with known standard errors, nine and a half of ten times by chance alone.
DEVIATIONS = 1.96
Outcome = Literal["difference", "within_noise", "unknown"]


class Score(Record):
    """One measurement of several runs; None where one has none. `name`: of a task, or of a text that `metric`
    bits_per_byte is of. `steps`: the checkpoints. `best`: whose is ahead of the next one.

    `outcome`: whether it is ahead by more than chance, as if each had been asked other questions; they were asked the
    same ones, so a difference is real more often than this says.
    """

    name: str
    metric: str
    filter: str = ""
    higher_is_better: bool | None
    values: tuple[float | None, ...]
    standard_errors: tuple[float | None, ...]
    steps: tuple[int | None, ...]
    best: str | None = None
    outcome: Outcome = "unknown"


def scores_of(subjects: Sequence[Subject]) -> tuple[Score, ...]:
    """Every measurement that two or more of them share; where they share none, all that there are."""
    own = [_newest(subject.scores) for subject in subjects]
    keys = list(dict.fromkeys(key for found in own for key in found))
    shared = [key for key in keys if sum(key in found for found in own) > 1]
    labels = [subject.label for subject in subjects]
    return tuple(_row([found.get(key) for found in own], labels) for key in shared or keys)


_Found = tuple[int, TextScore | TaskScore]


def _newest(scores: Sequence[Scores]) -> dict[tuple[Any, ...], _Found]:
    """The measurements of the newest checkpoint that has them, by what makes two of them comparable."""
    found: dict[tuple[Any, ...], _Found] = {}
    for each in sorted(scores, key=lambda each: each.step):
        found |= {_key(score): (each.step, score) for score in (*each.texts, *each.tasks)}
    return found


def _key(score: TextScore | TaskScore) -> tuple[Any, ...]:
    """Bits per byte of a whole text can be compared whatever the tokenizer and the context."""
    if isinstance(score, TaskScore):
        return ("task", *score.key)
    return ("text", score.sha256, None if score.whole else score.tokens)


def _row(found: Sequence[_Found | None], labels: Sequence[str]) -> Score:
    known = next(each[1] for each in found if each is not None)
    values = tuple(None if each is None else _value(each[1]) for each in found)
    errors = tuple(None if each is None else each[1].standard_error for each in found)
    if isinstance(known, TaskScore):
        named = {"name": known.task, "metric": known.metric, "filter": known.filter}
        higher = known.higher_is_better
    else:
        named = {"name": known.text, "metric": "bits_per_byte", "filter": ""}
        higher = False
    best, outcome = _ahead(values, errors, higher)
    return Score(
        **named, higher_is_better=higher, values=values, standard_errors=errors,
        steps=tuple(None if each is None else each[0] for each in found),
        best=None if best is None else labels[best], outcome=outcome,
    )  # fmt: skip


def _value(score: TextScore | TaskScore) -> float:
    return score.value if isinstance(score, TaskScore) else score.bits_per_byte


def _ahead(
    values: Sequence[float | None], errors: Sequence[float | None], higher: bool | None
) -> tuple[int | None, Outcome]:
    """(the place of the best, whether it is ahead of the next one by more than chance)."""
    sign = -1 if higher else 1
    order = sorted((sign * value, place) for place, value in enumerate(values) if value is not None)
    if higher is None or len(order) < 2:
        return None, "unknown"
    (first, best), (second, next_one) = order[:2]
    a, b = errors[best], errors[next_one]
    if a is None or b is None:
        return best if first < second else None, "unknown"
    beyond = second - first > DEVIATIONS * math.hypot(a, b)
    return (best, "difference") if beyond else (None, "within_noise")
