"""`compare`: subjects side by side. First what differs between them, then what each did, then what follows and what
does not, and which runs would tell the rest."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.comparison import repeats, settings
from foretrain.comparison.ablations import Ablation, ablation_runs
from foretrain.comparison.comparable import brought_together
from foretrain.comparison.questions import QUESTIONS, Pair, Question, Verdict, answer
from foretrain.comparison.repeats import Scatter
from foretrain.comparison.scaling import Scaling, scalings
from foretrain.comparison.scores import Score, scores_of
from foretrain.comparison.settings import Setting
from foretrain.comparison.subject import Memory, Subject
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import NANOGPT_PEAK_FLOP_PER_S

SCHEMA = "foretrain.compare/2"
MOST = 32


class Side(Record):
    """One subject in figures. Shares of one; None where its source does not tell.

    `step_low_s` to `step_high_s`: of a prediction its range, of a measurement nine of ten steady steps. Of several
    ranks `memory_bytes` is that of the one with most; `mfu` is of all `cards`.
    """

    label: str
    path: str
    kind: str
    program: str
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
    """The answer. `differing`: settings that are known to differ; `unknown`: that some say and others do not.

    `losses_apart`: why losses are not compared as they are, between any two: vocab_size, tokenizer, dataset, unit.
    `scatters`: what repeats among the runs tell of the scatter from start to start, by device. `scalings`: what more
    ranks bring, where their numbers differ. `scores`: what `foretrain eval` found of the runs.
    """

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
        """The verdict on this question. Raises StopIteration where it was not asked."""
        return next(verdict for verdict in self.verdicts if verdict.question == question)


def compare(subjects: Sequence[Subject]) -> Comparison:
    """Two subjects or more. Raises UserError where they are the same, or nothing of them can be compared."""
    if not 2 <= len(subjects) <= MOST:
        raise UserError("usage.compare_count", count=len(subjects), most=MOST)
    subjects = _told_apart(subjects)
    found = settings.between(subjects)
    subjects, scatters = repeats.learned(subjects, found)
    verdicts = tuple(answer(question, subjects, found) for question in QUESTIONS)
    differing = tuple(s for s in found if s.differs)
    if all(verdict.outcome == "not_comparable" for verdict in verdicts) and not differing:
        raise UserError("data.nothing_to_compare", one=subjects[0].label, other=subjects[1].label)
    apart = dict.fromkeys(
        reason for other in subjects[1:] for reason in brought_together(subjects[0], other)[3]
    )  # fmt: skip
    return Comparison(
        sides=tuple(_side(subject) for subject in subjects), differing=differing,
        unknown=tuple(s for s in found if not s.differs), verdicts=verdicts, losses_apart=tuple(apart),
        ablations=_ablations(subjects, differing, verdicts), scatters=scatters, scalings=scalings(subjects),
        scores=scores_of(subjects),
    )  # fmt: skip


def _told_apart(subjects: Sequence[Subject]) -> list[Subject]:
    """Labels that are each their own. Raises UserError for the same run twice."""
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
    """Whether two measurements are one: every step time and every loss the same; where few are, path and settings."""
    if len(one.step_times_s) + len(one.train) + len(one.val) < 5:
        return one.path == other.path and one.settings == other.settings and one.step_s == other.step_s
    return one.step_times_s == other.step_times_s and one.train == other.train and one.val == other.val


def _ablations(
    subjects: Sequence[Subject], differing: Sequence[Setting], verdicts: Sequence[Verdict]
) -> tuple[Ablation, ...]:
    """From the first subject towards each other one; the same run is named once."""
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
    """What nanoGPT would print, in units of an A100."""
    rate, flops = subject.tokens_per_s, subject.flops_per_token
    return rate * flops / subject.devices / NANOGPT_PEAK_FLOP_PER_S if rate and flops else None
