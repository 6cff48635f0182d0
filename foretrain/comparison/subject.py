"""`Subject`: one thing to compare, whatever it was read from; None is unknown, which is never taken as equal."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foretrain.analysis.log_checks import Utilization, utilization
from foretrain.base.records import Record
from foretrain.base.units import JOULES_PER_KWH
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import Note
from foretrain.predict.spec import StepName
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import power
from foretrain.runs.formats.log_format import LossUnit
from foretrain.runs.record import Scores

Kind = Literal["run", "plan", "config", "log", "table"]
Source = Literal["measured", "measured (log)", "estimated", "traced", "calibrated"]


class Curve(Record):
    """Finite losses by ascending optimizer step, in nats per token or bits per byte; `seconds_s` since the start."""

    steps: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    seconds_s: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


NO_CURVE = Curve()


class Memory(Record):
    """Bytes at the highest point. Measured: low and high are the same. `what`: reserved, process or needed."""

    low_bytes: float
    expected_bytes: float
    high_bytes: float
    source: Source
    what: Literal["reserved", "process", "needed"]


@dataclass(frozen=True)
class Subject:
    """One side of a comparison. `step_times_s`: steady steps as measured; `step_s`: the step, measured or predicted.

    `steps_since_start`: each one's step after the start of its process. `start_scatter`: deviation of its speed between
    starts. `settings`: option -> value. `val_unit`: of `val`. `world`: ranks that share a step. Figures of memory are
    of one rank, all others of all.
    """

    label: str
    path: str
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    config: RunConfig | None = None
    gpu: Gpu | None = None
    step: StepName = "nanogpt"
    tokens_per_step: int | None = None
    bytes_per_token: float | None = None
    step_times_s: tuple[float, ...] = ()
    steps_since_start: tuple[int, ...] = ()
    start_scatter: float | None = None
    step_s: Range | None = None
    step_source: Source | None = None
    used_by_others_bytes: int = 0
    generates: bool = False  # text, instead of training
    memory: Memory | None = None
    train: Curve = NO_CURVE
    val: Curve = NO_CURVE
    val_unit: LossUnit = "nats per token"
    train_unit: LossUnit = "nats per token"
    diverged: bool = False  # its last losses are not finite
    wall_s: float | None = None
    used: Utilization | None = None
    mfu: float | None = None
    printed_mfu: float | None = None
    rent_per_hour: float | None = None
    notes: tuple[Note, ...] = ()
    scores: tuple[Scores, ...] = ()
    world: int | None = None
    devices: int = 1

    @property
    def measured(self) -> bool:
        return self.step_source is not None and self.step_source.startswith("measured")

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens_per_step / self.step_s.expected_s if self.tokens_per_step and self.step_s else None

    @property
    def flops_per_token(self) -> int | None:
        return self.used.flops_per_token if self.used else None

    def cost_per_hour(self) -> float | None:
        if self.gpu is None:
            return None
        config = self.config or RunConfig()
        drawn = power(self.gpu, self.mfu)
        rent = config.price_per_hour if self.rent_per_hour is None else self.rent_per_hour
        if drawn is None and not rent:
            return None
        if rent or drawn is None:
            return rent * self.devices
        return self.devices * drawn.expected_w * 3600 / JOULES_PER_KWH * config.price_per_kwh

    def with_speed(self, step_s: Range, source: Source) -> "Subject":
        used = None
        if self.config is not None and self.gpu is not None:
            each_s = step_s.expected_s * self.devices  # as one card would take that is as quick as each of them
            used = utilization(self.config, self.gpu, each_s, tokens_per_step=self.tokens_per_step)
        mfu = used.mfu if used else self.mfu
        return replace(self, step_s=step_s, step_source=source, used=used, mfu=mfu)


def curve(points: Sequence[tuple[int, float, float | None]]) -> Curve:
    """Make the curve of (step, loss, seconds or None). A repeated step, as after a resume, replaces the later ones."""
    kept: list[tuple[int, float, float | None]] = []
    for point in points:
        while kept and kept[-1][0] >= point[0]:
            kept.pop()
        if abs(point[1]) < 1e6:  # NaN fails this too
            kept.append(point)
    timed = all(seconds is not None for _, _, seconds in kept)
    return Curve(
        steps=tuple(step for step, _, _ in kept), losses=tuple(loss for _, loss, _ in kept),
        seconds_s=tuple(seconds or 0.0 for _, _, seconds in kept) if timed else (),
    )  # fmt: skip


def exact(seconds: float) -> Range:
    return Range(low_s=seconds, expected_s=seconds, high_s=seconds)
