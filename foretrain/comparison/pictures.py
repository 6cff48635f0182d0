"""What a report of a comparison shows besides it: losses on one axis, what fits, how far forecasts were off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretrain.analysis.forecast_check import ForecastCheck, Row, Sources, of_directory
from foretrain.base.errors import UserError
from foretrain.comparison.compare import Comparison
from foretrain.comparison.loss_axes import EnergyMeter, LossCurves, loss_curves, meter_of
from foretrain.comparison.subject import Subject
from foretrain.predict.memory import Verdict, predict, worst_verdict
from foretrain.predict.plan import available
from foretrain.predict.spec import StepSpec
from foretrain.training.store import RunDirectory


@dataclass(frozen=True)
class CompareFacts:
    """`verdicts`: by label, of those whose memory is predicted. `checks`: rows of the runs, forecast by `sources`."""

    losses: LossCurves
    verdicts: dict[str, Verdict | None]
    checks: tuple[tuple[str, tuple[Row, ...]], ...]
    sources: Sources


Opened = Callable[[Path], RunDirectory]


def gather(subjects: Sequence[Subject], found: Comparison, opened: Opened = RunDirectory) -> CompareFacts:
    """`found`: the comparison of these subjects, in the same order; it has told their labels apart. `opened`: how the
    directories of runs are read."""
    named = [replace(s, label=side.label) for s, side in zip(subjects, found.sides, strict=True)]
    checks: list[tuple[str, tuple[Row, ...]]] = []
    sources: Sources = {"bytes": (), "seconds": ()}
    for subject in named:
        made = _checked(subject, opened)
        if made is not None and made.rows:
            checks.append((subject.label, made.rows))
            sources = {kind: tuple(dict.fromkeys(known + made.sources[kind])) for kind, known in sources.items()}
    return CompareFacts(
        losses=loss_curves(named, [_meter(subject, opened) for subject in named]),
        verdicts={s.label: _verdict(s) for s in named if s.memory and s.memory.source != "measured"},
        checks=tuple(checks), sources=sources,
    )  # fmt: skip


def _directory(subject: Subject) -> Path:
    path = Path(subject.path)
    return path if path.is_dir() else path.parent


def _meter(subject: Subject, opened: Opened) -> EnergyMeter | None:
    of_all = subject.kind == "run" and subject.devices == 1  # readings are of the first rank's card
    return meter_of(opened(_directory(subject)).read_lines("metrics")) if of_all else None


def _checked(subject: Subject, opened: Opened) -> ForecastCheck | None:
    """A run against its own forecast; a damaged forecast spoils no comparison."""
    if subject.kind != "run":
        return None
    path = _directory(subject)
    try:
        return of_directory(opened(path))[2]
    except UserError:
        return None


def _verdict(subject: Subject) -> Verdict | None:
    """As the ledger sees the subject's step on its card."""
    config, gpu = subject.config, subject.gpu
    if config is None or gpu is None:
        return None
    room, _ = available(config, gpu, subject.used_by_others_bytes)
    return worst_verdict(predict(StepSpec.of(config, gpu, subject.step), room))
