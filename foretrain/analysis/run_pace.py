"""Where a run's steps were slower than they could be, and the cause, where a figure of its own records shows one."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal

from foretrain.analysis.measured_step import (
    FIRST_SLOWER,
    FIRST_STEPS,
    SPIKE,
    Pace,
    pace_of_lines,
    starts_of,
    step_lines,
)
from foretrain.base.records import Record
from foretrain.base.statistics import extremes
from foretrain.base.units import MIB
from foretrain.hardware import devices
from foretrain.hardware.calibration import Calibration
from foretrain.hardware.card import SLOWING
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.limit import StepLimit, limit_of, peaks_of, with_kernels
from foretrain.runs.record import TrainedRun

HEAT = ("hardware_thermal", "thermal", "hardware_slowdown", "power_brake")
CLOCK_SHARE, CORES_SHARE = 0.97, 0.8  # of the steady lines' median; below that it was another clock, fewer cores
OTHERS_BYTES = 256 * MIB
OTHERS_CORES = 0.25  # more than usual


class Slower(Record):
    cause: str
    steps: int
    first_step: int
    last_step: int
    lost_s: float
    factor: float
    values: dict[str, float]


class RunPace(Record):
    """The steady step (nine of ten from `low_s` to `high_s`), and all that was slower. `counted_steps`: those of the
    lines; `data_wait_s`: their sum, None where unknown."""

    steady_s: float
    low_s: float
    high_s: float
    counted_steps: int
    slower: tuple[Slower, ...]
    data_wait_s: float | None

    @property
    def lost_s(self) -> float:
        return sum(one.lost_s for one in self.slower)


class _Line:
    def __init__(self, line: dict[str, Any], covers: int, head: bool) -> None:
        self.line, self.covers, self.head = line, covers, head
        self.step: int = line["step"]
        self.step_s: float = line["step_s"]

    def number(self, key: str) -> float | None:
        value = self.line.get(key)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    @property
    def cores(self) -> float | None:
        cpu_s, took = self.number("cpu_s"), self.step_s * self.covers
        return cpu_s / took if cpu_s is not None and took > 0 else None

    @property
    def data_wait_s(self) -> float | None:
        return self.number("data_wait_s")


def pace_of(
    metrics: list[dict[str, Any]], resumed_from: tuple[int, ...], *, compiled: bool, world_from: int = 0, world: int = 1
) -> RunPace | None:
    """Find the pace of a run; None where no step was logged. `world_from`: the first step with `world` ranks."""
    found = [line for line in step_lines(metrics) if line["step"] >= world_from]
    if not found:
        return None
    starts = starts_of(found, resumed_from)
    lines, pace = _lines(found, starts, world_from), pace_of_lines(found, starts)
    usual = [lines[i] for i in pace.indices]
    slow = {i for stretch in pace.slow for i in stretch}
    limit_s = max(pace.median_s * (1 + SPIKE), pace.median_s + 6 * pace.noise_s)
    heads, first = _heads(lines, pace), "compilation" if compiled else "first_steps"
    groups: dict[str, list[_Line]] = {}
    for i, line in enumerate(lines):
        if i in heads or i in slow or line.step_s > limit_s:
            cause = first if i in heads else _cause(line, usual, pace.median_s, world)
            groups.setdefault(cause, []).append(line)
    slower = [_slower(cause, group, usual, pace.median_s) for cause, group in groups.items()]
    known = [wait * line.covers for line in lines if (wait := line.data_wait_s) is not None]
    return RunPace(
        steady_s=pace.median_s, low_s=pace.low_s, high_s=pace.high_s, counted_steps=sum(line.covers for line in lines),
        slower=tuple(sorted((s for s in slower if s.lost_s > 0), key=lambda s: -s.lost_s)),
        data_wait_s=sum(known) if known else None,
    )  # fmt: skip


def _lines(found: list[dict[str, Any]], starts: list[int], first_step: int) -> list[_Line]:
    lines, before = [], first_step - 1
    for i, line in enumerate(found):
        lines.append(_Line(line, max(1, line["step"] - before), i in starts))
        before = line["step"]
    return lines


def _heads(lines: list[_Line], pace: Pace) -> set[int]:
    found: set[int] = set()
    limit_s = pace.median_s * (1 + FIRST_SLOWER) + 6 * pace.noise_s
    for start in (i for i, line in enumerate(lines) if line.head):
        for i in range(start, min(start + FIRST_STEPS, len(lines))):
            if lines[i].step_s <= limit_s:
                break
            found.add(i)
    return found if len(found) < len(lines) else set()


def _usual(usual: list[_Line], of: Callable[[_Line], float | None]) -> float | None:
    values = [value for line in usual if (value := of(line)) is not None]
    return median(values) if values else None


def _cause(line: _Line, usual: list[_Line], steady_s: float, world: int) -> str:
    """Name what a figure shows, the first of: data, heat, clock, others on the card, others on the processor."""
    wait, usual_wait = line.data_wait_s, _usual(usual, lambda one: one.data_wait_s) or 0.0
    if wait is not None and wait - usual_wait >= 0.5 * (line.step_s - steady_s):
        return "data_wait"
    reasons = line.line.get("clock_reasons")
    reasons = reasons if isinstance(reasons, list) else []
    clock, usual_clock = line.number("clock_ghz"), _usual(usual, lambda one: one.number("clock_ghz"))
    lower = clock is not None and usual_clock is not None and clock < CLOCK_SHARE * usual_clock
    hot = next((reason for reason in HEAT if reason in reasons), None)
    if hot is not None:
        return hot
    if lower:
        return "power_cap" if "power_cap" in reasons else "clock"
    for key, more, cause in (
        ("used_by_others_bytes", OTHERS_BYTES, "others_card"),
        ("others_cores", OTHERS_CORES, "others_cpu"),
    ):
        others, usual_others = line.number(key), _usual(usual, lambda one, key=key: one.number(key))
        if others is not None and usual_others is not None and others > usual_others + more:
            return cause
    cores, usual_cores = line.cores, _usual(usual, lambda one: one.cores)
    # On a card the host waits, and for how long tells nothing; a process that computes uses the cores that it gets.
    if clock is None and cores is not None and usual_cores is not None and cores < CORES_SHARE * usual_cores:
        return "others_cpu" if world == 1 else "other_ranks"  # a waiting rank computes nothing
    return "unknown"


def _slower(cause: str, group: list[_Line], usual: list[_Line], steady_s: float) -> Slower:
    steps = sum(line.covers for line in group)
    lost_s = sum((line.step_s - steady_s) * line.covers for line in group)
    values: dict[str, float] = {}
    measures: tuple[tuple[str, Callable[[_Line], float | None]], ...] = (
        ("clock_ghz", lambda one: one.number("clock_ghz")),
        ("used_by_others_bytes", lambda one: one.number("used_by_others_bytes")),
        ("temperature_c", lambda one: one.number("temperature_c")), ("cores", lambda one: one.cores),
        ("data_wait_s", lambda one: one.data_wait_s),
    )  # fmt: skip
    for name, of in measures:
        there, otherwise = _usual(group, of), _usual(usual, of)
        if there is not None and otherwise is not None:
            values |= {name: there, f"usual_{name}": otherwise}
    return Slower(
        cause=cause, steps=steps, first_step=group[0].step, last_step=group[-1].step, lost_s=lost_s,
        factor=1 + lost_s / steps / steady_s, values=values,
    )  # fmt: skip


def logged_steps(record: TrainedRun, metrics: Sequence[dict[str, Any]]) -> tuple[int, int]:
    done, interval = record.steps_done, record.config.log_interval
    expected = -(-done // interval)
    if done == record.config.max_iters and (done - 1) % interval:
        expected += 1
    return len({m["step"] for m in metrics if m.get("kind") == "step" and m["step"] < done}), expected


def much_is_lost(there: int, expected: int) -> bool:
    """Return whether it is more than the few steps that are skipped as not finite, or that a crash cut off."""
    return expected - there > max(2, 0.1 * expected)


class RunLimit(Record):
    """A run's steady step beside its device's limit. `rest_s`: unexplained by kernels; None where uncalibrated."""

    step_s: float
    share: float
    rest_s: float | None
    step: StepLimit
    calibrated: str  # when


def calibration_here(gpu: Gpu) -> Calibration | None:
    here = devices.device_named(devices.CPU) if gpu.kind == "cpu" else devices.find_device(devices.HERE)
    return here.calibration if here and here.name == gpu.name else None


def limit_of_run(record: TrainedRun, step_s: float, calibration: Calibration) -> RunLimit | None:
    """Return the share of its limit that a run reaches; None without a measured peak, or on several ranks."""
    if record.world > 1:
        return None
    gpu = record.gpu.model_copy(update={"calibration": calibration})
    spec = StepSpec.of(record.config, gpu, dtype=record.dtype, compiled=record.compiled)
    limit = limit_of(spec, peaks_of(calibration))
    if limit is None or not step_s:
        return None
    limit = with_kernels(limit, spec)
    kernels = [group.kernels_s for group in limit.groups]
    known = None not in kernels
    return RunLimit(
        step_s=step_s, share=limit.limit_s / step_s, step=limit, calibrated=calibration.date,
        rest_s=step_s - sum(each or 0.0 for each in kernels) if known else None,
    )  # fmt: skip


SignName = Literal["tokens_per_s", "mfu", "power_w", "temperature_c", "clock_ghz", "memory_bytes"]
SIGNS: tuple[SignName, ...] = ("mfu", "tokens_per_s", "power_w", "temperature_c", "clock_ghz", "memory_bytes")
MOST = 200  # points of a curve; its picture is small
MOST_SPANS = 60


class Sign(Record):
    """One curve: values at hours since the start. The unit is in the name; mfu is a share of one."""

    name: SignName
    hours: tuple[float, ...]
    values: tuple[float, ...]


class Throttled(Record):
    reason: str
    from_hours: float
    to_hours: float


class VitalSigns(Record):
    """`on_card`: whether there was a card; a CPU has no such figures."""

    signs: tuple[Sign, ...]
    throttled: tuple[Throttled, ...]
    on_card: bool

    def sign(self, name: SignName) -> Sign | None:
        return next((sign for sign in self.signs if sign.name == name), None)


def of_lines(lines: Sequence[dict[str, Any]], *, on_card: bool) -> VitalSigns:
    """Read lines with `elapsed_s` and any of the signs, `clock_reasons` among them; others are skipped."""
    points: dict[SignName, list[tuple[float, float]]] = {name: [] for name in SIGNS}
    reasons: list[tuple[float, list[str]]] = []
    last_hours = -1.0
    for line in lines:
        elapsed_s = _number(line.get("elapsed_s"))
        if elapsed_s is None or elapsed_s / 3600 < last_hours:
            continue
        last_hours = hours = elapsed_s / 3600
        for name in SIGNS:
            if (value := _number(line.get(name))) is not None:
                points[name].append((hours, value))
        given = line.get("clock_reasons")
        if isinstance(given, list):
            reasons.append((hours, [reason for reason in given if reason in SLOWING]))
    signs = tuple(_sign(name, found) for name, found in points.items() if len(found) > 1)
    return VitalSigns(signs=signs, throttled=_spans(reasons), on_card=on_card)


def of_samples(samples: Sequence[dict[str, Any]], card: int) -> list[dict[str, Any]]:
    lines = []
    for sample in samples:
        cards = sample.get("cards")
        found = next((c for c in cards if isinstance(c, dict) and c.get("index") == card), None) if cards else None
        if found is not None:
            lines.append(
                {
                    "elapsed_s": sample.get("elapsed_s"), "power_w": found.get("power_w"),
                    "temperature_c": found.get("temperature_c"), "clock_ghz": found.get("clock_ghz"),
                    "clock_reasons": found.get("reasons"), "memory_bytes": found.get("ours_bytes"),
                }
            )  # fmt: skip
    return lines


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _sign(name: SignName, found: list[tuple[float, float]]) -> Sign:
    kept = extremes([value for _, value in found], MOST)
    return Sign(name=name, hours=tuple(found[i][0] for i in kept), values=tuple(found[i][1] for i in kept))


def _spans(reasons: list[tuple[float, list[str]]]) -> tuple[Throttled, ...]:
    """Join readings with the same reason into one span; of very many the longest are kept."""
    spans: list[Throttled] = []
    for reason in SLOWING:
        start, before = None, 0.0
        for hours, given in [*reasons, (reasons[-1][0] if reasons else 0.0, [])]:
            if reason in given and start is None:
                start = before  # a line's figure holds since the line before it
            elif reason not in given and start is not None:
                spans.append(Throttled(reason=reason, from_hours=start, to_hours=before))
                start = None
            before = hours
    spans.sort(key=lambda span: span.from_hours - span.to_hours)
    return tuple(sorted(spans[:MOST_SPANS], key=lambda span: span.from_hours))
