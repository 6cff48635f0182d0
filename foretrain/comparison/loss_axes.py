"""Loss curves over steps, tokens, hours, energy (measured, else hours times the planned power), money."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from foretrain.analysis.forecast_check import ForecastCheck, Row, Sources, of_directory
from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.statistics import extremes
from foretrain.base.units import JOULES_PER_KWH
from foretrain.comparison.compare import Comparison
from foretrain.comparison.subject import Curve, Subject
from foretrain.config.options import RunConfig
from foretrain.predict.memory import Verdict, predict
from foretrain.predict.plan import available
from foretrain.predict.spec import StepSpec
from foretrain.predict.timing import power
from foretrain.runs.folder import RunDirectory

AxisName = Literal["tokens", "hours", "kwh", "cost", "step"]
AXES: tuple[AxisName, ...] = ("tokens", "hours", "kwh", "cost", "step")
MOST = 320  # points of a curve that are kept


class EnergyMeter(Record):
    at_s: tuple[float, ...]
    energy_j: tuple[float, ...]

    def until_j(self, elapsed_s: float) -> float:
        """Return the joules until then, between two readings in proportion; after the last one at the mean power."""
        place = bisect_right(self.at_s, elapsed_s)
        if place >= len(self.at_s):
            return self.energy_j[-1] * elapsed_s / self.at_s[-1]
        before_s, before_j = (self.at_s[place - 1], self.energy_j[place - 1]) if place else (0.0, 0.0)
        share = (elapsed_s - before_s) / (self.at_s[place] - before_s)
        return before_j + share * (self.energy_j[place] - before_j)


class LossCurve(Record):
    label: str
    kind: Literal["train", "val"]
    unit: str
    losses: tuple[float, ...]
    axes: dict[AxisName, tuple[float, ...]]


class LossCurves(Record):
    """All curves of a report, and the `axes` of every curve. `predicted_hours`: labels whose hours are planned."""

    curves: tuple[LossCurve, ...]
    axes: tuple[AxisName, ...]
    energy_source: Literal["measured", "estimated", "none"]
    predicted_hours: tuple[str, ...]
    currency: str


def meter_of(lines: Sequence[dict[str, Any]]) -> EnergyMeter | None:
    """Read lines with `elapsed_s` and `power_w`; each power holds from the line before it to its own."""
    at_s, energy_j, total_j, before_s = [], [], 0.0, 0.0
    for line in lines:
        elapsed_s, power_w = line.get("elapsed_s"), line.get("power_w")
        if not isinstance(power_w, int | float) or not isinstance(elapsed_s, int | float) or elapsed_s <= before_s:
            continue
        total_j += power_w * (elapsed_s - before_s)
        before_s = elapsed_s
        at_s.append(elapsed_s)
        energy_j.append(total_j)
    return EnergyMeter(at_s=tuple(at_s), energy_j=tuple(energy_j)) if at_s else None


def loss_curves(subjects: Sequence[Subject], meters: Sequence[EnergyMeter | None] = ()) -> LossCurves:
    known = list(meters) or [None] * len(subjects)
    curves: list[LossCurve] = []
    for subject, meter in zip(subjects, known, strict=True):
        for kind, curve, unit in (("train", subject.train, subject.train_unit), ("val", subject.val, subject.val_unit)):
            if len(curve):
                axes = _axes(subject, curve, meter)
                curves.append(_thinned(subject.label, kind, unit, curve, axes))
    shared: tuple[AxisName, ...] = tuple(
        name for name in AXES if curves and all(name in curve.axes for curve in curves)
    )
    measured = all(meter is not None for meter in known)
    source = "none" if "kwh" not in shared else "measured" if measured else "estimated"
    guessed = tuple(s.label for s in subjects if any(len(c) and not c.seconds_s for c in (s.train, s.val)))
    currencies = [s.config.currency for s in subjects if s.config]
    return LossCurves(
        curves=tuple(curves), axes=shared, energy_source=source, currency=(currencies or [RunConfig().currency])[0],
        predicted_hours=guessed if "hours" in shared else (),
    )  # fmt: skip


def _thinned(label: str, kind: Any, unit: str, curve: Curve, axes: dict[AxisName, list[float]]) -> LossCurve:
    kept = extremes(curve.losses, MOST)
    return LossCurve(
        label=label, kind=kind, unit=unit, losses=tuple(curve.losses[i] for i in kept),
        axes={name: tuple(values[i] for i in kept) for name, values in axes.items()},
    )  # fmt: skip


def _axes(subject: Subject, curve: Curve, meter: EnergyMeter | None) -> dict[AxisName, list[float]]:
    found: dict[AxisName, list[float]] = {"step": [float(step) for step in curve.steps]}
    if subject.tokens_per_step:
        found["tokens"] = [float(step * subject.tokens_per_step) for step in curve.steps]
    seconds_s = _seconds(subject, curve)
    if not seconds_s:
        return found
    found["hours"] = [seconds / 3600 for seconds in seconds_s]
    drawn = power(subject.gpu, subject.mfu) if subject.gpu else None
    config, rent = subject.config or RunConfig(), subject.rent_per_hour
    rent = config.price_per_hour if rent is None else rent
    if meter is not None or drawn is not None:
        found["kwh"] = [
            (meter.until_j(seconds) if meter else subject.devices * drawn.expected_w * seconds if drawn else 0.0)
            / JOULES_PER_KWH
            for seconds in seconds_s
        ]
        found["cost"] = [kwh * config.price_per_kwh for kwh in found["kwh"]]
    if rent:  # a renter pays no electricity
        found["cost"] = [hours * rent * subject.devices for hours in found["hours"]]
    return {name: values for name, values in found.items() if _rises(values)}


def _seconds(subject: Subject, curve: Curve) -> tuple[float, ...]:
    if curve.seconds_s or subject.step_s is None:
        return curve.seconds_s
    return tuple(step * subject.step_s.expected_s for step in curve.steps)


def _rises(values: list[float]) -> bool:
    """Return whether it can be an axis: nowhere backwards, and not all the same where there are several."""
    return all(a <= b for a, b in pairwise(values)) and (len(values) < 2 or values[-1] > values[0])


@dataclass(frozen=True)
class CompareFacts:
    losses: LossCurves
    verdicts: dict[str, Verdict | None]
    checks: tuple[tuple[str, tuple[Row, ...]], ...]
    sources: Sources


Opened = Callable[[Path], RunDirectory]


def gather(subjects: Sequence[Subject], found: Comparison, opened: Opened = RunDirectory) -> CompareFacts:
    """Gather the facts. `found`: the comparison of these subjects. `opened`: reads the directories of runs."""
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
    if subject.kind != "run":
        return None
    path = _directory(subject)
    try:
        return of_directory(opened(path))[2]
    except UserError:
        return None


def _verdict(subject: Subject) -> Verdict | None:
    config, gpu = subject.config, subject.gpu
    if config is None or gpu is None:
        return None
    room, _ = available(config, gpu, subject.used_by_others_bytes)
    return predict(StepSpec.of(config, gpu, subject.step), room).verdict
