"""The questions of a comparison, each with its answer: a winner, no difference beyond noise, or why not to be told.

And whether the answer can be put down to a setting: only where one alone differs that can have this effect.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field

from foretrain.base.records import Record
from foretrain.comparison import matched_loss as equal
from foretrain.comparison import settings
from foretrain.comparison.repeats import Interval, are_repeats, assumed, of_times, shared
from foretrain.comparison.settings import Effect, Setting, brought_together
from foretrain.comparison.subject import Subject

Question = Literal["speed", "mfu", "tokens", "flops", "hours", "money", "memory"]
QUESTIONS: tuple[Question, ...] = ("speed", "mfu", "tokens", "flops", "hours", "money", "memory")
EFFECTS: dict[Question, tuple[Effect, ...]] = {
    "speed": ("speed",), "mfu": ("speed",), "tokens": ("learning",), "flops": ("learning",),
    "hours": ("speed", "learning"), "money": ("speed", "learning"), "memory": ("memory",),
}  # fmt: skip
# A smaller model is faster and takes less memory: which of two models is better is a question of what they learn.
OF_SIZE: frozenset[Question] = frozenset({"speed", "mfu", "memory"})
LEARNING: tuple[Question, ...] = ("tokens", "flops", "hours", "money")
SIZE: tuple[Effect, ...] = ("speed", "memory")
# Measured memory that is not the same to the byte: reserved by segments, or a process with all its libraries.
MEMORY_NOISE = {"reserved": 0.01, "process": 0.05, "needed": 0.0}
# Two predictions of one program on one card are off alike: nine of ten of the 1,087 pairs in
# benchmarks/published_logs.json with one source, card and mode differ from it by up to 20 %, half by up to 6 %.
SAME_CARD_RATIO = 0.20
Outcome = Literal["difference", "within_noise", "forecast", "within_forecast", "few_steps", "not_comparable"]
Attribution = Literal["", "one", "confounded", "none", "forecast", "unknown", "unsaid", "unsaid_losses"]


class Pair(Record):
    """Two figures of a question. `stretch_s`: of runs of unlike lengths, the seconds from their starts that count.

    `share`: how much better the first is, with its bounds; None where none is known.

    `at`: the place on the `axis` where losses were read; `split` and `unit`: which loss. `predicted_times`: whose hours
    are by a predicted step.
    """

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

    `unknown`: how many more could, which one side does not say. `reason`: why there is no pair. `unlike_models`:
    settings of the model that differ, where the question is then one of size: neither is better, whatever the figures.
    """

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
    """Two figures that grow with the speed; which is ahead is left to the caller."""
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
    """Of a ratio of two speeds: both step times at the ends of their ranges, less where the same error is in both."""
    assert one.step_s
    assert other.step_s
    if _alike(one, other):
        return (1 + share) * (1 - SAME_CARD_RATIO) - 1, (1 + share) * (1 + SAME_CARD_RATIO) - 1
    ratio = (1 + share) * one.step_s.expected_s / other.step_s.expected_s
    return ratio * other.step_s.low_s / one.step_s.high_s - 1, ratio * other.step_s.high_s / one.step_s.low_s - 1


def _alike(one: Subject, other: Subject) -> bool:
    """Whether two predictions are of one kind: device, program, compiled or not, arithmetic."""
    if one.measured or other.measured or one.step_source != other.step_source or one.gpu != other.gpu:
        return False
    return all(one.settings.get(name) == other.settings.get(name) for name in ("program", "compile", "dtype", "matmul"))


def speed(one: Subject, other: Subject) -> Pair | str:
    """Tokens a second."""
    return _by_rate(one, other, lambda subject: subject.tokens_per_s)


def mfu(one: Subject, other: Subject) -> Pair | str:
    """Share of the card's peak."""
    found = _by_rate(one, other, lambda subject: subject.used.mfu if subject.used else None)
    return "no_mfu" if isinstance(found, str) else found


def memory(one: Subject, other: Subject) -> Pair | str:
    """Bytes at the highest moment; less is better, so the share is how much less the first takes."""
    a, b = one.memory, other.memory
    if a is None or b is None:
        return "no_memory"
    share = 1 - a.expected_bytes / b.expected_bytes
    low, high = 1 - a.high_bytes / b.low_bytes, 1 - a.low_bytes / b.high_bytes
    if a.source == b.source and a.source in ("estimated", "traced") and a.what == b.what:
        # The same formulas: context and slack, which make the range, are off in the same way.
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


def learning(axis: equal.Axis) -> Compare:
    """Loss at equal tokens, FLOPs, hours or money; less is better."""

    def compare(one: Subject, other: Subject) -> Pair | str:
        first, second, basis, _ = brought_together(one, other)
        if basis == "not":
            return "other_tokens"
        missing = _lacks(first, second, axis)
        found = None if missing else equal.meet(first, second, axis)
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


def _predicted_times(subjects: Sequence[Subject], axis: equal.Axis, split: str) -> tuple[str, ...]:
    """Whose place on an axis of time is by the forecast's step time."""
    if axis not in ("hours", "money"):
        return ()
    curves = [(s, s.train if split == "training" else s.val) for s in subjects]
    return tuple(s.label for s, c in curves if not c.seconds_s and not s.measured)


def _lacks(one: Subject, other: Subject, axis: equal.Axis) -> str:
    """What keeps them from meeting on an axis; empty where they may."""
    if axis == "tokens" and one.tokens_per_step is None and other.tokens_per_step is None:
        axis = "steps"
    if _lacking("no_loss", (one, other)):
        return "no_loss"
    reason = f"no_{axis}"
    for subject in (one, other):
        curves = [curve for curve in (subject.train, subject.val) if len(curve)]
        if all(equal.positions(subject, curve, axis) is None for curve in curves) and _lacking(reason, (one, other)):
            return reason
    return ""


COMPARE: dict[Question, Compare] = {
    "speed": speed, "mfu": mfu, "tokens": learning("tokens"), "flops": learning("flops"), "hours": learning("hours"),
    "money": learning("money"), "memory": memory,
}  # fmt: skip


def answer(question: Question, subjects: Sequence[Subject], found: Sequence[Setting]) -> Verdict:
    """The best of the subjects against the next best; in `others` each other one against the first."""
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
    """Two subjects compared; why not, where they can only be from one side, as runs that hardly overlap can."""
    back = compare(other, one)
    return compare(one, other) if isinstance(back, Pair) else back


def _best(compare: Compare, subjects: Sequence[Subject], found: Sequence[Setting]) -> tuple[Pair, Subject, Subject]:
    """(the pair, the best, the next best); whoever cannot be compared with the best so far is passed over, and so are
    repeats of the best where there is anybody else."""
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
    if not rest:  # the best so far meets nobody: the first pair that can be had
        rest = [
            (pair, s) for s in subjects[1:] if isinstance(pair := compare(subjects[0], s), Pair)
        ]  # fmt: skip
        best = subjects[0]
    pair, other = min(rest, key=lambda item: item[0].share)
    return pair, best, other


def _reason_values(reason: str, subjects: Sequence[Subject]) -> dict[str, Any]:
    """What the sentence about a missing answer names."""
    if reason == "other_tokens":
        _, _, _, different = brought_together(subjects[0], subjects[1])
        lacks = [s.label for s in subjects[:2] if s.bytes_per_token is None and s.val_unit != "bits a byte"]
        return {"different": list(different), "lacks": lacks}
    return {"lacks": _lacking(reason, subjects)}


def _lacking(reason: str, subjects: Sequence[Subject]) -> list[str]:
    """The labels of those who do not tell what a reason is about."""
    lacks: dict[str, Callable[[Subject], bool]] = {
        "no_loss": lambda s: not len(s.train) and not len(s.val),
        "no_speed": lambda s: s.tokens_per_s is None,
        "no_mfu": lambda s: s.used is None or s.used.mfu is None,
        "no_memory": lambda s: s.memory is None,
        "no_tokens": lambda s: s.tokens_per_step is None,
        "no_flops": lambda s: s.flops_per_token is None or s.tokens_per_step is None,
        "no_hours": lambda s: s.step_s is None and not s.train.seconds_s and not s.val.seconds_s,
        "no_money": lambda s: s.cost_per_hour() is None,
    }
    return [s.label for s in subjects if reason in lacks and lacks[reason](s)]
