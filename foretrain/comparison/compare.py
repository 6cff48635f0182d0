"""`compare`: differences between subjects, their figures, conclusions, and runs that would answer the rest."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.comparison import repeats, settings
from foretrain.comparison.ablations import Ablation, ablation_runs
from foretrain.comparison.questions import QUESTIONS, Pair, Question, Verdict, answer
from foretrain.comparison.repeats import Scatter
from foretrain.comparison.settings import Setting, brought_together
from foretrain.comparison.subject import Memory, Subject
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import NANOGPT_PEAK_FLOP_PER_S
from foretrain.runs.record import Scores, TaskScore, TextScore

Why = Literal["", "one_processor", "other_cards", "other_models", "other_program", "no_speed"]


class Scaling(Record):
    """`more` has more cards (ranks, on one processor) than `fewer`; both are labels. `efficiency`: the speed-up by the
    ratio of the cards; None for a reason `why`."""

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
    """Return why the two tell nothing of how training scales; empty where they do."""
    if more.gpu is None or fewer.gpu is None or more.gpu.name != fewer.gpu.name:
        return "other_cards"
    if more.devices == fewer.devices:
        return "one_processor"
    if more.flops_per_token != fewer.flops_per_token:
        return "other_models"
    if more.step != fewer.step:
        return "other_program"
    return "" if more.tokens_per_s and fewer.tokens_per_s else "no_speed"


# Of a difference of two figures with known standard errors, 95% by chance alone.
DEVIATIONS = 1.96
Outcome = Literal["difference", "within_noise", "unknown"]


class Score(Record):
    """One measurement of several runs; None where one has none. `name`: of a task, or of a text for bits_per_byte.
    `outcome`: whether `best` is ahead by more than chance."""

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
    own = [_newest(subject.scores) for subject in subjects]
    keys = list(dict.fromkeys(key for found in own for key in found))
    shared = [key for key in keys if sum(key in found for found in own) > 1]
    labels = [subject.label for subject in subjects]
    return tuple(_row([found.get(key) for found in own], labels) for key in shared or keys)


_Found = tuple[int, TextScore | TaskScore]


def _newest(scores: Sequence[Scores]) -> dict[tuple[Any, ...], _Found]:
    found: dict[tuple[Any, ...], _Found] = {}
    for each in sorted(scores, key=lambda each: each.step):
        found |= {_key(score): (each.step, score) for score in (*each.texts, *each.tasks)}
    return found


def _key(score: TextScore | TaskScore) -> tuple[Any, ...]:
    """Return what makes two scores comparable: of a whole text neither the tokenizer nor the context."""
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


SCHEMA = "foretrain.compare/1"
MOST = 32


class Side(Record):
    """One subject in figures. Shares of one; None where its source does not tell. `step_low_s` to `step_high_s`: a
    prediction's range, nine of ten measured steps. Of ranks `memory_bytes` is the highest."""

    label: str
    path: str
    kind: str
    program: str
    has_settings: bool
    gpu_name: str | None
    speed_source: str | None
    tokens_per_step: int | None
    step_s: float | None
    step_low_s: float | None
    step_high_s: float | None
    steady_steps: int
    micro_batch_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    nanogpt_mfu: float | None
    printed_mfu: float | None
    memory_bytes: float | None
    memory_low_bytes: float | None
    memory_high_bytes: float | None
    memory_source: str | None
    memory_what: str | None
    last_step: int | None
    tokens: int | None
    wall_s: float | None
    train_loss: float | None
    val_loss: float | None
    loss_unit: str
    bits_per_byte: float | None
    cost_per_hour: float | None
    currency: str
    notes: tuple[Note, ...]
    ranks: int | None = None
    cards: int = 1
    card_tokens_per_s: float | None = None


class Comparison(Record):
    """`differing`: settings that are known to differ; `unknown`: known of some only. `losses_apart`: why any two losses
    are not compared as they are. `scatters`: from start to start by repeats among the runs, by device. `scalings`: the
    effect of more ranks."""

    sides: tuple[Side, ...]
    differing: tuple[Setting, ...]
    unknown: tuple[Setting, ...]
    verdicts: tuple[Verdict, ...]
    losses_apart: tuple[str, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    scatters: tuple[Scatter, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    scores: tuple[Score, ...] = ()

    def verdict(self, question: Question) -> Verdict:
        """Raises StopIteration where the question was not asked."""
        return next(verdict for verdict in self.verdicts if verdict.question == question)


def compare(subjects: Sequence[Subject]) -> Comparison:
    """Compare two subjects or more. Raises UserError where they are the same, or have nothing to compare."""
    if not 2 <= len(subjects) <= MOST:
        raise UserError("usage.compare_count", count=len(subjects), most=MOST)
    subjects = _distinct(subjects)
    found = settings.between(subjects)
    subjects, scatters = repeats.learned(subjects, found)
    verdicts = tuple(answer(question, subjects, found) for question in QUESTIONS)
    differing = tuple(s for s in found if s.differs)
    apart = dict.fromkeys(reason for other in subjects[1:] for reason in brought_together(subjects[0], other)[3])
    silent = all(verdict.outcome == "not_comparable" and verdict.reason != "diverged" for verdict in verdicts)
    if silent and not differing and not apart:
        raise UserError("data.nothing_to_compare", one=subjects[0].label, other=subjects[1].label)
    return Comparison(
        sides=tuple(_side(subject) for subject in subjects), differing=differing,
        unknown=tuple(s for s in found if not s.differs), verdicts=verdicts, losses_apart=tuple(apart),
        ablations=_ablations(subjects, differing, verdicts), scatters=scatters, scalings=scalings(subjects),
        scores=scores_of(subjects),
    )  # fmt: skip


def _distinct(subjects: Sequence[Subject]) -> list[Subject]:
    """Give each a label of its own. Raises UserError for the same run twice."""
    named: list[Subject] = []
    for subject in subjects:
        for before in named:
            if _same(before, subject):
                raise UserError("usage.compare_same", one=before.path, other=subject.path)
        label, number = subject.label, 2
        while any(label == before.label for before in named):
            label, number = f"{subject.label} ({number})", number + 1
        named.append(subject if label == subject.label else replace(subject, label=label))
    return named


def _same(one: Subject, other: Subject) -> bool:
    """Return whether two measurements are one: every step time and loss the same; where few are, path and settings."""
    if len(one.step_times_s) + len(one.train) + len(one.val) < 5:
        return one.path == other.path and one.settings == other.settings and one.step_s == other.step_s
    return one.step_times_s == other.step_times_s and one.train == other.train and one.val == other.val


def _ablations(
    subjects: Sequence[Subject], differing: Sequence[Setting], verdicts: Sequence[Verdict]
) -> tuple[Ablation, ...]:
    runs: list[Ablation] = []
    pairs: tuple[Pair, ...] = next(verdict.others for verdict in verdicts if verdict.question == "tokens")
    compared = {pair.one: pair.at for pair in pairs if pair.axis == "tokens"}
    for place, other in enumerate(subjects[1:], 1):
        own = settings.differing(differing, 0, place)
        for run in ablation_runs(subjects[0], other, own, place, compared.get(other.label)):
            if not any((run.setting, run.value, run.steps) == (r.setting, r.value, r.steps) for r in runs):
                runs.append(run)
    return tuple(runs)


def _side(subject: Subject) -> Side:
    step, memory, used = subject.step_s, subject.memory, subject.used
    low, high = _spread(subject)
    accumulation = subject.settings.get("gradient_accumulation_steps")
    last = max((c.steps[-1] for c in (subject.train, subject.val) if len(c)), default=None)
    config = subject.config
    bits = None
    if subject.val_unit == "bits a byte" and len(subject.val):
        bits = subject.val.losses[-1]
    return Side(
        label=subject.label, path=subject.path, kind=subject.kind, program=str(subject.settings.get("program", "")),
        has_settings=any(settings.is_compared(name) for name in subject.settings),
        gpu_name=subject.gpu.name if subject.gpu else None, speed_source=subject.step_source,
        tokens_per_step=subject.tokens_per_step, step_s=step.expected_s if step else None, step_low_s=low,
        step_high_s=high, steady_steps=len(subject.step_times_s),
        micro_batch_s=step.expected_s * (subject.world or 1) / accumulation if step and accumulation else None,
        tokens_per_s=subject.tokens_per_s, mfu=used.mfu if used else subject.mfu,
        nanogpt_mfu=_nanogpt_mfu(subject), printed_mfu=subject.printed_mfu, **_memory(memory), last_step=last,
        tokens=last * subject.tokens_per_step if last and subject.tokens_per_step else None, wall_s=subject.wall_s,
        train_loss=subject.train.losses[-1] if len(subject.train) else None,
        val_loss=subject.val.losses[-1] if len(subject.val) else None, loss_unit=subject.val_unit, bits_per_byte=bits,
        cost_per_hour=subject.cost_per_hour(), currency=(config or RunConfig()).currency, notes=subject.notes,
        ranks=subject.world, cards=subject.devices,
        card_tokens_per_s=subject.tokens_per_s / subject.devices if subject.tokens_per_s else None,
    )  # fmt: skip


def _memory(memory: Memory | None) -> dict[str, Any]:
    return {
        "memory_bytes": memory.expected_bytes if memory else None,
        "memory_low_bytes": memory.low_bytes if memory else None,
        "memory_high_bytes": memory.high_bytes if memory else None,
        "memory_source": memory.source if memory else None,
        "memory_what": memory.what if memory else None,
    }


def _spread(subject: Subject) -> tuple[float | None, float | None]:
    if subject.step_s is None:
        return None, None
    times = sorted(subject.step_times_s)
    if not subject.measured or not times:
        return subject.step_s.low_s, subject.step_s.high_s
    return times[round(0.05 * (len(times) - 1))], times[round(0.95 * (len(times) - 1))]


def _nanogpt_mfu(subject: Subject) -> float | None:
    """Return what nanoGPT would print, in units of an A100."""
    rate, flops = subject.tokens_per_s, subject.flops_per_token
    return rate * flops / subject.devices / NANOGPT_PEAK_FLOP_PER_S if rate and flops else None
