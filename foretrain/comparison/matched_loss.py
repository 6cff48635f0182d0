"""Losses of two subjects at equal tokens, FLOPs, hours or money: where both have been, at the end of what is common.

Validation losses are compared at the evaluations of the one that has fewer, the other interpolated between its own
(straight in the logarithm of the axis); training losses as means over the last fifth of the common stretch, piece by
piece. The differences of the pieces give the noise.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from foretrain.comparison.repeats import SEED_TO_SEED, Interval, of_differences
from foretrain.comparison.subject import Curve, Subject

Axis = Literal["tokens", "steps", "flops", "hours", "money"]
TAIL = 0.2  # share of the common stretch, at its end, over which training losses are averaged
PIECES = 40
FEWEST_PIECES = 5
# Validation is what is compared, unless its last common point is before this share of what training shares, or nobody
# says how many tokens an evaluation has.
LAST = 0.5
# An evaluation on n tokens is off by this share of the loss over the root of n. Those of case B1's published log, of
# 3.3 M tokens each, stray from their neighbours by 3.7 (benchmarks/compare_power.py).
EVALUATION_NOISE = 4.0
EVALUATED_TOKENS = 100_000  # assumed where there are only evaluations, and nobody says how large

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Meeting:
    """Two losses at the same place. `at`: tokens, steps, FLOPs, hours or money.

    `interval`: by which share of the other loss the one is lower.
    """

    axis: Axis
    split: Literal["validation", "training"]
    at: float
    one: float
    other: float
    interval: Interval


def positions(subject: Subject, curve: Curve, axis: Axis) -> Points | None:
    """(places, losses) of a curve on an axis, beyond zero; None where the subject does not tell enough."""
    if not len(curve):
        return None
    seconds = _seconds(subject, curve)
    match axis:
        case "tokens":
            factor, base = subject.tokens_per_step, [float(step) for step in curve.steps]
        case "steps":
            factor, base = 1, [float(step) for step in curve.steps]
        case "flops":
            flops, tokens = subject.flops_per_token, subject.tokens_per_step
            factor, base = flops * tokens if flops and tokens else None, [float(step) for step in curve.steps]
        case "hours":
            factor, base = 1 / 3600, seconds
        case "money":
            cost = subject.cost_per_hour()
            factor, base = cost / 3600 if cost else None, seconds
    if not factor or base is None:
        return None
    kept = [(x * factor, loss) for x, loss in zip(base, curve.losses, strict=True) if x > 0]
    return ([x for x, _ in kept], [loss for _, loss in kept]) if kept else None


def _seconds(subject: Subject, curve: Curve) -> list[float] | None:
    """As measured, else by the step time, measured or predicted."""
    if curve.seconds_s:
        return list(curve.seconds_s)
    return [step * subject.step_s.expected_s for step in curve.steps] if subject.step_s else None


def meet(one: Subject, other: Subject, axis: Axis) -> Meeting | None:
    """Where the two can be compared on this axis; None where nothing is common.

    Tokens are steps where nobody says how many tokens a step has.
    """
    if axis == "tokens" and one.tokens_per_step is None and other.tokens_per_step is None:
        axis = "steps"
    training = [positions(subject, subject.train, axis) for subject in (one, other)]
    validation = [positions(subject, subject.val, axis) for subject in (one, other)]
    same_train = one.train_unit == other.train_unit
    by_training = _by_training(axis, training[0], training[1]) if training[0] and training[1] and same_train else None
    if validation[0] and validation[1] and one.val_unit == other.val_unit:
        found = _by_validation(axis, validation[0], validation[1], _floor(one, other))
        said = all(subject.config is not None for subject in (one, other))
        if found and (by_training is None or (said and found.at >= LAST * by_training.at)):
            return found
    return by_training


def _floor(one: Subject, other: Subject) -> float:
    """What no curve shows: another seed, and another sample of the validation text."""
    seeds = 2 * SEED_TO_SEED**2
    if _same_evaluation(one, other):
        return math.sqrt(seeds)
    return math.sqrt(seeds + sum(EVALUATION_NOISE**2 / evaluated_tokens(subject) for subject in (one, other)))


def _same_evaluation(one: Subject, other: Subject) -> bool:
    """foretrain draws its evaluation from the seed alone, so that runs of one seed are evaluated on the same text."""
    names = ("seed", "dataset contents", "eval_sequences", "eval_block_size", "block_size")
    mine, theirs = ([s.settings.get(name) for name in names] for s in (one, other))
    return one.kind == other.kind == "run" and None not in mine and mine == theirs


def evaluated_tokens(subject: Subject) -> float:
    """Tokens of one evaluation."""
    config = subject.config
    return config.eval_rows * config.eval_block if config else EVALUATED_TOKENS


def _by_training(axis: Axis, one: Points, other: Points) -> Meeting | None:
    start, end = max(one[0][0], other[0][0]), min(one[0][-1], other[0][-1])
    if end < start:
        return None
    low = max(start, end * (1 - TAIL))
    counts = [bisect_right(xs, end) - bisect_left(xs, low) for xs in (one[0], other[0])]
    pieces = max(1, min(PIECES, *(count // 2 for count in counts)))
    width = (end - low) / pieces or end
    means = [_means(points, low, end, width, pieces) for points in (one, other)]
    pairs = [(a, b) for a, b in zip(*means, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    first, second = (fmean(losses) for losses in zip(*pairs, strict=True))
    floor = SEED_TO_SEED * math.sqrt(2) if len(pairs) >= FEWEST_PIECES else 5 * SEED_TO_SEED
    interval = of_differences([b - a for a, b in pairs], second, floor)
    return Meeting(axis, "training", end, first, second, interval)


def _means(points: Points, low: float, end: float, width: float, pieces: int) -> list[float | None]:
    sums, counts = [0.0] * pieces, [0] * pieces
    xs, losses = points
    for i in range(bisect_left(xs, low), bisect_right(xs, end)):
        piece = min(pieces - 1, int((xs[i] - low) / width))
        sums[piece] += losses[i]
        counts[piece] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _by_validation(axis: Axis, one: Points, other: Points, floor: float) -> Meeting | None:
    fewer, more, turned = (one, other, False) if len(one[0]) <= len(other[0]) else (other, one, True)
    places = [x for x in fewer[0] if more[0][0] <= x * (1 + 1e-9) and x <= more[0][-1] * (1 + 1e-9)]
    if not places:
        return None
    pairs = [(_at(fewer, x), _at(more, x)) for x in places]
    pairs = [(b, a) if turned else (a, b) for a, b in pairs]
    end = places[-1]
    late = [(a, b) for x, (a, b) in zip(places, pairs, strict=True) if x >= end * (1 - TAIL)]
    late = late if len(late) >= FEWEST_PIECES else pairs[-1:]
    first, second = (fmean(losses) for losses in zip(*late, strict=True))
    return Meeting(axis, "validation", end, first, second, of_differences([b - a for a, b in late], second, floor))


def _at(points: Points, x: float) -> float:
    """The loss at a place, straight in the logarithm between neighbours."""
    xs, losses = points
    i = bisect_left(xs, x * (1 - 1e-9))
    if i >= len(xs):
        return losses[-1]
    if i == 0 or xs[i] <= x * (1 + 1e-9):
        return losses[i]
    share = math.log(x / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
    return losses[i - 1] + share * (losses[i] - losses[i - 1])
