"""The questions of a comparison, each with its answer: a winner, no difference beyond noise, or why there is none."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from foretrain.base.records import Record
from foretrain.comparison import settings
from foretrain.comparison.repeats import SEED_TO_SEED, Interval, are_repeats, assumed, of_differences, of_times, shared
from foretrain.comparison.settings import Effect, Setting, brought_together, of_text
from foretrain.comparison.subject import Curve, Subject

Question = Literal["speed", "mfu", "tokens", "flops", "hours", "money", "memory"]
QUESTIONS: tuple[Question, ...] = ("speed", "mfu", "tokens", "flops", "hours", "money", "memory")
EFFECTS: dict[Question, tuple[Effect, ...]] = {
    "speed": ("speed",), "mfu": ("speed",), "tokens": ("learning",), "flops": ("learning",),
    "hours": ("speed", "learning"), "money": ("speed", "learning"), "memory": ("memory",),
}  # fmt: skip
# A smaller model is faster and takes less memory: which model is better depends on what they learned.
OF_SIZE: frozenset[Question] = frozenset({"speed", "mfu", "memory"})
LEARNING: tuple[Question, ...] = ("tokens", "flops", "hours", "money")
SIZE: tuple[Effect, ...] = ("speed", "memory")
# Measured memory that varies: reserved by segments, or a process with all its libraries.
MEMORY_NOISE = {"reserved": 0.01, "process": 0.05, "needed": 0.0}
# Two predictions of one program on one card have similar errors: nine of ten of the 1,087 pairs in
# benchmarks/published_logs.json with one source, card and mode differ in it by up to 20%, half by up to 6%.
SAME_CARD_RATIO = 0.20
Outcome = Literal["difference", "within_noise", "forecast", "within_forecast", "few_steps", "not_comparable"]
Attribution = Literal["", "one", "confounded", "none", "forecast", "unknown", "unsaid", "unsaid_losses"]

Axis = Literal["tokens", "steps", "flops", "hours", "money"]


class Pair(Record):
    """Two figures of a question. `stretch_s`: of runs of unlike lengths, the seconds from their starts that count.
    `share`: how much better the first is. `at`: the place on the `axis` where losses were read."""

    one: str
    other: str
    one_value: float
    other_value: float
    share: float
    low: float | None
    high: float | None
    outcome: Outcome
    at: float | None = None
    axis: str = ""
    split: str = ""
    unit: str = ""
    predicted_times: tuple[str, ...] = ()
    stretch_s: float | None = None


class Verdict(Record):
    """The answer to a question: the best against the next. `settings`: those that differ and can have this effect.
    `unknown`: how many more could. `reason`: why there is no pair. `unlike_models`: settings of the model that
    differ."""

    question: Question
    outcome: Outcome
    pair: Pair | None = None
    others: tuple[Pair, ...] = ()
    attribution: Attribution = ""
    settings: tuple[str, ...] = ()
    unknown: int = 0
    unlike_models: tuple[str, ...] = ()
    reason: str = ""
    reason_values: dict[str, Any] = Field(default_factory=dict)


Compare = Callable[[Subject, Subject], "Pair | str"]


def _outcome(interval: Interval | None) -> Outcome:
    if interval is None:
        return "few_steps"
    return "difference" if interval.beyond else "within_noise"


def _by_rate(one: Subject, other: Subject, value: Callable[[Subject], float | None]) -> Pair | str:
    first, second = value(one), value(other)
    if first is None or second is None:
        return "no_speed"
    share, stretch_s = first / second - 1, None
    assert one.step_s
    assert other.step_s
    if not (one.measured and other.measured):
        low, high = _bounds(share, one, other)
        outcome: Outcome = "forecast" if low > 0 or high < 0 else "within_forecast"
    else:
        stretch = shared((one, other))
        scale = (1 + share) * one.step_s.expected_s / other.step_s.expected_s  # what is not the step time
        first /= stretch.slower(0, one.step_s.expected_s)
        second /= stretch.slower(1, other.step_s.expected_s)
        share, stretch_s = first / second - 1, stretch.seconds_s
        scatter = max(assumed(s) if s.start_scatter is None else s.start_scatter for s in (one, other))
        interval = of_times(stretch.times_s[0], stretch.times_s[1], math.hypot(scatter, stretch.floor))
        low, high = ((1 + interval.low) * scale - 1, (1 + interval.high) * scale - 1) if interval else (None, None)
        outcome = "few_steps" if low is None or high is None else _beyond(low, high)
    return Pair(
        one=one.label, other=other.label, one_value=first, other_value=second, share=share, low=low, high=high,
        outcome=outcome, stretch_s=stretch_s,
    )  # fmt: skip


def _beyond(low: float, high: float) -> Outcome:
    return "difference" if low > 0 or high < 0 else "within_noise"


def _bounds(share: float, one: Subject, other: Subject) -> tuple[float, float]:
    """Return the bounds of a ratio of two speeds, less where the same error is in both."""
    assert one.step_s
    assert other.step_s
    if _alike(one, other):
        return (1 + share) * (1 - SAME_CARD_RATIO) - 1, (1 + share) * (1 + SAME_CARD_RATIO) - 1
    ratio = (1 + share) * one.step_s.expected_s / other.step_s.expected_s
    return ratio * other.step_s.low_s / one.step_s.high_s - 1, ratio * other.step_s.high_s / one.step_s.low_s - 1


def _alike(one: Subject, other: Subject) -> bool:
    """Return whether two predictions are of one kind: device, program, compiled or not, arithmetic."""
    if one.measured or other.measured or one.step_source != other.step_source or one.gpu != other.gpu:
        return False
    return all(one.settings.get(name) == other.settings.get(name) for name in ("program", "compile", "dtype", "matmul"))


def speed(one: Subject, other: Subject) -> Pair | str:
    return _by_rate(one, other, lambda subject: subject.tokens_per_s)


def mfu(one: Subject, other: Subject) -> Pair | str:
    found = _by_rate(one, other, lambda subject: subject.used.mfu if subject.used else None)
    return "no_mfu" if isinstance(found, str) else found


def memory(one: Subject, other: Subject) -> Pair | str:
    """Compare bytes at the peak; the share is how much less the first takes."""
    a, b = one.memory, other.memory
    if a is None or b is None:
        return "no_memory"
    share = 1 - a.expected_bytes / b.expected_bytes
    low, high = 1 - a.high_bytes / b.low_bytes, 1 - a.low_bytes / b.high_bytes
    if a.source == b.source and a.source in ("estimated", "traced") and a.what == b.what:
        # The same formulas: context and slack, which make the range, have the same errors.
        low = high = share
        outcome: Outcome = "forecast" if share else "within_forecast"
    elif a.source == b.source:
        noise = MEMORY_NOISE[a.what]
        low, high = share - noise, share + noise
        outcome = _beyond(low, high)
    else:
        outcome = "forecast" if low > 0 or high < 0 else "within_forecast"
    return Pair(
        one=one.label, other=other.label, one_value=a.expected_bytes, other_value=b.expected_bytes, share=share,
        low=low, high=high, outcome=outcome,
    )  # fmt: skip


def learning(axis: Axis) -> Compare:
    def compare(one: Subject, other: Subject) -> Pair | str:
        first, second, basis, _ = brought_together(one, other)
        if basis == "not":
            return "other_tokens" if of_text(one) and of_text(other) else "other_units"
        missing = _lacks(first, second, axis)
        found = None if missing else meet(first, second, axis)
        if found is None:
            return missing or "nothing_common"
        interval, predicted = found.interval, _predicted_times((one, other), axis, found.split)
        outcome = _outcome(interval)
        return Pair(
            one=one.label, other=other.label, one_value=found.one, other_value=found.other, share=interval.share,
            low=interval.low, high=interval.high, at=found.at,
            axis=found.axis, split=found.split, predicted_times=predicted,
            outcome="forecast" if predicted and outcome == "difference" else outcome,
            unit=first.train_unit if found.split == "training" else basis,
        )  # fmt: skip

    return compare


def _predicted_times(subjects: Sequence[Subject], axis: Axis, split: str) -> tuple[str, ...]:
    if axis not in ("hours", "money"):
        return ()
    curves = [(s, s.train if split == "training" else s.val) for s in subjects]
    return tuple(s.label for s, c in curves if not c.seconds_s and not s.measured)


def _lacks(one: Subject, other: Subject, axis: Axis) -> str:
    if axis == "tokens" and one.tokens_per_step is None and other.tokens_per_step is None:
        axis = "steps"
    for reason in ("no_loss", "diverged"):
        if _lacking(reason, (one, other)):
            return reason
    reason = f"no_{axis}"
    for subject in (one, other):
        curves = [curve for curve in (subject.train, subject.val) if len(curve)]
        if all(positions(subject, curve, axis) is None for curve in curves) and _lacking(reason, (one, other)):
            return reason
    return ""


COMPARE: dict[Question, Compare] = {
    "speed": speed, "mfu": mfu, "tokens": learning("tokens"), "flops": learning("flops"), "hours": learning("hours"),
    "money": learning("money"), "memory": memory,
}  # fmt: skip


def answer(question: Question, subjects: Sequence[Subject], found: Sequence[Setting]) -> Verdict:
    """Compare the best of the subjects with the next best; in `others` each other one with the first."""
    compare = COMPARE[question]
    against_first = [_both_ways(compare, other, subjects[0]) for other in subjects[1:]]
    pairs = tuple(pair for pair in against_first if isinstance(pair, Pair))
    if not pairs:
        reason = next(text for text in against_first if isinstance(text, str))
        return Verdict(question=question, outcome="not_comparable", reason=reason,
                       reason_values=_reason_values(reason, subjects))  # fmt: skip
    pair, best, other = _best(compare, subjects, found)
    one, two = subjects.index(best), subjects.index(other)
    can = _can(found, one, two, EFFECTS[question])
    of_size = question in OF_SIZE
    unknown = sum(s.unknown_between(one, two) and bool(set(s.affects) & set(EFFECTS[question])) for s in found)
    attribution = _attribution(pair, len(can), unknown)
    if attribution in ("one", "none") and all(s.config is None and s.kind != "run" for s in (best, other)):
        attribution = "unsaid_losses" if question in LEARNING else "unsaid"
    return Verdict(
        question=question, outcome=pair.outcome, pair=pair, others=pairs, settings=tuple(s.name for s in can),
        unknown=unknown, attribution=attribution,
        unlike_models=tuple(s.name for s in _can(found, one, two, SIZE) if s.group == "model") if of_size else (),
    )  # fmt: skip


def _can(found: Sequence[Setting], one: int, other: int, effects: tuple[Effect, ...]) -> list[Setting]:
    return [s for s in settings.differing(found, one, other) if set(s.affects) & set(effects)]


def _attribution(pair: Pair, count: int, unknown: int) -> Attribution:
    if pair.outcome not in ("difference", "forecast", "within_forecast") or not pair.share:
        return ""
    if count > 1:
        return "confounded"
    if unknown:
        return "unknown"
    return "one" if count else "none" if pair.outcome == "difference" else "forecast"


def _both_ways(compare: Compare, one: Subject, other: Subject) -> Pair | str:
    """Compare two subjects; return the reason where they can only be compared from one side."""
    back = compare(other, one)
    return compare(one, other) if isinstance(back, Pair) else back


def _best(compare: Compare, subjects: Sequence[Subject], found: Sequence[Setting]) -> tuple[Pair, Subject, Subject]:
    """Return (the pair, the best, the next best), without what the best cannot be compared with, or repeats of it."""
    best = subjects[0]
    for other in subjects[1:]:
        pair = compare(best, other)
        if isinstance(pair, Pair) and pair.share < 0:
            best = other
    rest = [(pair, s) for s in subjects if s is not best and isinstance(pair := compare(best, s), Pair)]
    place = subjects.index(best)
    others = [item for item in rest if not are_repeats(found, subjects, place, subjects.index(item[1]))]
    if compare in (speed, mfu) and others:
        rest = others
    if not rest:  # the best so far meets nobody: the first possible pair
        rest = [(pair, s) for s in subjects[1:] if isinstance(pair := compare(subjects[0], s), Pair)]
        best = subjects[0]
    pair, other = min(rest, key=lambda item: item[0].share)
    return pair, best, other


def _reason_values(reason: str, subjects: Sequence[Subject]) -> dict[str, Any]:
    if reason == "other_tokens":
        _, _, _, different = brought_together(subjects[0], subjects[1])
        lacks = [s.label for s in subjects[:2] if s.bytes_per_token is None and s.val_unit != "bits a byte"]
        return {"different": list(different), "lacks": lacks}
    return {"lacks": _lacking(reason, subjects)}


def _lacking(reason: str, subjects: Sequence[Subject]) -> list[str]:
    lacks: dict[str, Callable[[Subject], bool]] = {
        "other_units": lambda s: not of_text(s),
        "no_loss": lambda s: not len(s.train) and not len(s.val),
        "diverged": lambda s: s.diverged,
        "no_speed": lambda s: s.tokens_per_s is None,
        "no_mfu": lambda s: s.used is None or s.used.mfu is None,
        "no_memory": lambda s: s.memory is None,
        "no_tokens": lambda s: s.tokens_per_step is None,
        "no_flops": lambda s: s.flops_per_token is None or s.tokens_per_step is None,
        "no_hours": lambda s: s.step_s is None and not s.train.seconds_s and not s.val.seconds_s,
        "no_money": lambda s: s.cost_per_hour() is None,
    }
    return [s.label for s in subjects if reason in lacks and lacks[reason](s)]


TAIL = 0.2  # share of the common part, at its end, over which training losses are averaged
PIECES = 40
FEWEST_PIECES = 5
# Validation is compared, unless its last common point is before this share of training's, or evaluations have unknown
# sizes.
LAST = 0.5
# An evaluation on n tokens is off by this share of the loss over the root of n. Those of case B1's published log, of
# 3.3 M tokens each, differ from their neighbours by 3.7 (benchmarks/compare_power.py).
EVALUATION_NOISE = 4.0
EVALUATED_TOKENS = 100_000  # assumed where there are only evaluations of unknown size

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Meeting:
    """Two losses at the same place. `at`: tokens, steps, FLOPs, hours or money. `interval`: of their share."""

    axis: Axis
    split: Literal["validation", "training"]
    at: float
    one: float
    other: float
    interval: Interval


def positions(subject: Subject, curve: Curve, axis: Axis) -> Points | None:
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
    if curve.seconds_s:
        return list(curve.seconds_s)
    return [step * subject.step_s.expected_s for step in curve.steps] if subject.step_s else None


def meet(one: Subject, other: Subject, axis: Axis) -> Meeting | None:
    """Find where the two can be compared on this axis; None where nothing is common. Unknown tokens count as steps."""
    if axis == "tokens" and one.tokens_per_step is None and other.tokens_per_step is None:
        axis = "steps"
    training = [positions(subject, subject.train, axis) for subject in (one, other)]
    validation = [positions(subject, subject.val, axis) for subject in (one, other)]
    same_train = one.train_unit == other.train_unit
    by_training = _by_training(axis, training[0], training[1]) if training[0] and training[1] and same_train else None
    if validation[0] and validation[1] and one.val_unit == other.val_unit:
        found = _by_validation(axis, validation[0], validation[1], _floor(one, other))
        both_known = all(subject.config is not None for subject in (one, other))
        if found and (by_training is None or (both_known and found.at >= LAST * by_training.at)):
            return found
    return by_training


def _floor(one: Subject, other: Subject) -> float:
    """Return the noise that no curve shows: another seed, and another sample of the validation text."""
    seeds = 2 * SEED_TO_SEED**2
    if _same_evaluation(one, other):
        return math.sqrt(seeds)
    return math.sqrt(seeds + sum(EVALUATION_NOISE**2 / evaluated_tokens(subject) for subject in (one, other)))


def _same_evaluation(one: Subject, other: Subject) -> bool:
    """Return whether both are evaluated on the same text, which foretrain draws from the seed alone."""
    names = ("seed", "dataset contents", "eval_sequences", "eval_block_size", "block_size")
    mine, theirs = ([s.settings.get(name) for name in names] for s in (one, other))
    return one.kind == other.kind == "run" and None not in mine and mine == theirs


def evaluated_tokens(subject: Subject) -> float:
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
    xs, losses = points
    i = bisect_left(xs, x * (1 - 1e-9))
    if i >= len(xs):
        return losses[-1]
    if i == 0 or xs[i] <= x * (1 + 1e-9):
        return losses[i]
    share = math.log(x / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
    return losses[i - 1] + share * (losses[i] - losses[i - 1])
