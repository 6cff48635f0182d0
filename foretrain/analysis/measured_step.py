"""A run's step time, one definition for all commands: the median in metrics.jsonl without the first steps of each
start, lasting slow-downs, and single slow steps."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.config.options import RunConfig
from foretrain.runs.folder import RunDirectory
from foretrain.runs.formats import FORMATS
from foretrain.runs.record import TrainedRun
from foretrain.runs.training_log import EVALUATED, SAVED, LogHeader, Steps, TrainingLog

SLOWER = 0.05  # a slow-down is at least this much slower than the steady step, and lasts
SPIKE = 0.10
FIRST_STEPS = 10  # of a segment; slow ones at its head are compilation
FIRST_SLOWER = 0.25

Kind = Literal["compilation", "evaluation", "evaluation_and_saving", "saving", "slow_down", "spike"]


class Disturbance(Record):
    """Steps that took longer for one reason. `lost_s`: all together; `slower_factor`: 1.1 for 10% slower."""

    kind: Kind
    count: int
    first_step: int
    last_step: int
    each_s: float
    lost_s: float
    slower_factor: float


@dataclass(frozen=True)
class Pace:
    """`indices`: the steady steps. `slow`: index ranges of sustained slow-downs. `recent_s`: the pace at the end."""

    median_s: float
    low_s: float
    high_s: float
    recent_s: float
    noise_s: float
    indices: tuple[int, ...]
    slow: tuple[tuple[int, ...], ...]


def steady(log: TrainingLog, config: RunConfig | None) -> Pace:
    """Find the steady step: without first steps, evaluations, saves, slow-downs and spikes. Raises UserError."""
    ordinary = _ordinary(log, config)
    if not ordinary:
        raise UserError("data.log_no_times", count=len(log.steps))
    times = log.steps.time_s
    windows = _windows(ordinary)
    middles = [median(times[i] for i in window) for window in windows]
    # The level of the faster windows: a card that throttled for most of a run is compared with when it did not.
    level_s = sorted(middles)[(len(middles) - 1) // 4]
    noise_s = _noise(times, windows, middles)
    limit_s = max(level_s * (1 + SLOWER), level_s + 5 * noise_s / math.sqrt(len(windows[0])))
    slow = _slow_windows(windows, [middle > limit_s for middle in middles])
    slow = tuple(_to_the_step(indices, ordinary, times, level_s) for indices in slow)
    in_slow = {i for indices in slow for i in indices}
    spike_s = max(level_s * (1 + SPIKE), level_s + 6 * noise_s)
    kept = tuple(i for i in ordinary if i not in in_slow and times[i] <= spike_s) or tuple(ordinary)
    values = sorted(times[i] for i in kept)
    last = slow[-1] if slow and slow[-1][-1] == ordinary[-1] else None
    return Pace(
        median_s=median(values), low_s=_quantile(values, 0.05), high_s=_quantile(values, 0.95),
        recent_s=median(times[i] for i in last) if last else median(values), noise_s=noise_s, indices=kept, slow=slow,
    )  # fmt: skip


def has_only_first_steps(log: TrainingLog) -> bool:
    firsts = {segment[0] for segment in log.steps.segments()}
    timed = [i for i, time_s in enumerate(log.steps.time_s) if math.isfinite(time_s)]
    means = log.program.mean_times and any(log.steps.number[i] >= FIRST_STEPS for i in timed)
    return bool(timed) and not means and firsts.issuperset(timed)


def log_of(numbers: Sequence[int], times_s: Sequence[float], starts: list[int]) -> TrainingLog:
    unknown = array("d", [math.nan] * len(numbers))
    steps = Steps(
        number=array("q", numbers), time_s=array("d", times_s), loss=unknown, logged_mfu=unknown, tokens_per_s=unknown,
        happened=bytearray(len(numbers)), starts=starts,
    )  # fmt: skip
    return TrainingLog(FORMATS["build-nanogpt"], LogHeader(), steps, (), numbers[-1])


def _evaluates(log: TrainingLog, config: RunConfig | None, i: int) -> int:
    happened = log.steps.happened[i]
    if config is not None and log.program.times_evaluation and log.steps.number[i] % config.eval_interval == 0:
        return happened or (0 if log.evaluations else EVALUATED)
    return happened


def _ordinary(log: TrainingLog, config: RunConfig | None) -> list[int]:
    """Return the steps with a time, without evaluation or save, and without the head of each segment."""
    times = log.steps.time_s
    timed = [i for i in range(len(times)) if math.isfinite(times[i])]
    quiet = [i for i in timed if not _evaluates(log, config, i)]
    found: list[int] = []
    for head in (5, 1):
        heads = {i for segment in log.steps.segments() for i in segment[:head]}
        found = [i for i in quiet if i not in heads]
        if len(found) >= 5:
            return found
    return found or quiet or timed


def _windows(indices: list[int]) -> list[list[int]]:
    """Cut neighbouring steps into windows of 5 to 50, a twentieth of the run each; the rest joins the last."""
    size = min(50, max(5, len(indices) // 20))
    windows = [indices[i : i + size] for i in range(0, len(indices), size)]
    if len(windows) > 1 and len(windows[-1]) < size:
        rest = windows.pop()
        windows[-1] += rest
    return windows


def _noise(times: Sequence[float], windows: list[list[int]], middles: list[float]) -> float:
    deviations = [abs(times[i] - middle) for window, middle in zip(windows, middles, strict=True) for i in window]
    return 1.4826 * median(deviations)


def _slow_windows(windows: list[list[int]], slow: list[bool]) -> tuple[tuple[int, ...], ...]:
    """Return runs of at least two slow windows; a single one is a few spikes."""
    found = []
    for is_slow, group in groupby(zip(windows, slow, strict=True), key=lambda pair: pair[1]):
        run = [window for window, _ in group]
        if is_slow and len(run) >= 2:
            found.append(tuple(i for window in run for i in window))
    return tuple(found)


def _to_the_step(
    indices: tuple[int, ...], ordinary: list[int], times: Sequence[float], level_s: float
) -> tuple[int, ...]:
    """Move the ends of a slow-down to where the steps cross half-way, not where a window happened to end."""
    half_s = (level_s + median(times[i] for i in indices)) / 2
    start, end = bisect_left(ordinary, indices[0]), bisect_left(ordinary, indices[-1])
    while start < end and times[ordinary[start]] < half_s:
        start += 1
    while end > start and times[ordinary[end]] < half_s:
        end -= 1
    while start > 0 and times[ordinary[start - 1]] >= half_s:
        start -= 1
    while end + 1 < len(ordinary) and times[ordinary[end + 1]] >= half_s:
        end += 1
    return tuple(ordinary[start : end + 1])


def _quantile(values: list[float], share: float) -> float:
    return values[round(share * (len(values) - 1))]


def disturbances(log: TrainingLog, pace: Pace, config: RunConfig | None, interval: int) -> tuple[Disturbance, ...]:
    """Return what took longer, by reason; a slow-down also covers the unprinted steps in between."""
    times = log.steps.time_s
    groups: dict[Kind, list[int]] = {"compilation": _compiling(log, pace)}
    taken = {i for indices in (groups["compilation"], *pace.slow) for i in indices}
    names: dict[int, Kind] = {
        EVALUATED: "evaluation", EVALUATED | SAVED: "evaluation_and_saving", SAVED: "saving", 0: "spike",
    }  # fmt: skip
    spike_s = max(pace.median_s * (1 + SPIKE), pace.median_s + 6 * pace.noise_s)
    for i in range(len(times)):
        happened = _evaluates(log, config, i)
        if i not in taken and times[i] > (pace.median_s if happened else spike_s):
            groups.setdefault(names[happened], []).append(i)
    each = spans(log, interval)
    found = [_disturbance(log, kind, indices, pace.median_s, each) for kind, indices in groups.items() if indices]
    lasting = each if log.program.mean_times else [interval] * len(each)
    found += [_disturbance(log, "slow_down", list(indices), pace.median_s, lasting) for indices in pace.slow]
    return tuple(sorted(found, key=lambda d: -d.lost_s))


def _compiling(log: TrainingLog, pace: Pace) -> list[int]:
    found = []
    for segment in log.steps.segments():
        for i in segment[:FIRST_STEPS]:
            time_s = log.steps.time_s[i]
            if math.isfinite(time_s) and time_s <= pace.median_s * (1 + FIRST_SLOWER) + 6 * pace.noise_s:
                break
            if math.isfinite(time_s):
                found.append(i)
    return found if len(found) < len(log.steps) else []


def spans(log: TrainingLog, interval: int) -> list[int]:
    """Return how many steps each printed time stands for: one, or all since the line before where it is their mean."""
    numbers = log.steps.number
    found = [1] * len(numbers)
    for segment in log.steps.segments() if log.program.mean_times else ():
        found[segment[0]] = max(1, min(interval, numbers[segment[0]]))
        for i in segment[1:]:
            found[i] = max(1, numbers[i] - numbers[i - 1])
    return found


def _disturbance(
    log: TrainingLog, kind: Kind, indices: list[int], steady_s: float, stands_for: Sequence[int]
) -> Disturbance:
    beyond = [log.steps.time_s[i] - steady_s for i in indices]
    each = median(beyond)
    lost_s = sum(time_s * stands_for[i] for time_s, i in zip(beyond, indices, strict=True))
    return Disturbance(
        kind=kind, count=len(indices), first_step=log.steps.number[indices[0]],
        last_step=log.steps.number[indices[-1]], each_s=each, lost_s=lost_s,
        slower_factor=1 + each / steady_s,
    )  # fmt: skip


CHANGED = 1.15  # ratio between the starts of a run whose speed has changed
CACHED_RUNS = 512


class Start(Record):
    """A part of a run between two starts of its process. `step_s`: its median, without its first line."""

    first_step: int
    last_step: int
    step_s: float


class MeasuredStep(Record):
    step_s: float
    starts: tuple[Start, ...]

    @property
    def note(self) -> Note | None:
        """Note that the speed changed when the run was resumed, with the slowest and the fastest start."""
        slow = max(self.starts, key=lambda start: start.step_s)
        fast = min(self.starts, key=lambda start: start.step_s)
        if slow.step_s < CHANGED * fast.step_s:
            return None
        values = {
            "slow": slow.step_s, "slow_first": slow.first_step, "slow_last": slow.last_step, "fast": fast.step_s,
            "fast_first": fast.first_step, "fast_last": fast.last_step, "step": self.step_s,
        }  # fmt: skip
        return Note(id="speed_changed", values=values)


def step_lines(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in metrics if line.get("kind") == "step" and 0 < line.get("step_s", 0) < 1e9]


def starts_of(lines: Sequence[dict[str, Any]], resumed_from: tuple[int, ...]) -> list[int]:
    return [
        i
        for i, line in enumerate(lines)
        if i == 0
        or line["step"] <= lines[i - 1]["step"]
        or any(lines[i - 1]["step"] < start <= line["step"] for start in resumed_from)
    ]


def pace_of_lines(lines: Sequence[dict[str, Any]], starts: list[int]) -> Pace:
    return steady(log_of([line["step"] for line in lines], [line["step_s"] for line in lines], starts), None)


def steady_times(
    numbers: Sequence[int], times_s: Sequence[float], starts: list[int] | None = None
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return (the steady step times, each one's step since its start). `starts`: the index of each."""
    times = [time_s if 0 < time_s < 1e9 else math.nan for time_s in times_s]
    if not any(math.isfinite(time_s) for time_s in times):
        return (), ()
    if starts is None:
        starts = [i for i, number in enumerate(numbers) if i == 0 or number <= numbers[i - 1]]
    log = log_of(numbers, times, starts)
    kept = steady(log, None).indices
    return tuple(times[i] for i in kept), since_start(log, kept)


def since_start(log: TrainingLog, indices: Sequence[int]) -> tuple[int, ...]:
    firsts = {i: log.steps.number[segment[0]] for segment in log.steps.segments() for i in segment}
    return tuple(log.steps.number[i] - firsts[i] for i in indices)


def measured(
    metrics: Sequence[dict[str, Any]], resumed_from: tuple[int, ...], world_from: int = 0
) -> MeasuredStep | None:
    """Measure a run's step; None where none was logged. `world_from`: the first step with the final number of ranks."""
    lines = [line for line in step_lines(metrics) if line["step"] >= world_from]
    if not lines:
        return None
    starts = starts_of(lines, resumed_from)
    stretches = [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return MeasuredStep(
        step_s=pace_of_lines(lines, starts).median_s,
        starts=tuple(
            Start(
                first_step=stretch[0]["step"], last_step=stretch[-1]["step"],
                step_s=median(line["step_s"] for line in stretch[1:] or stretch),
            )
            for stretch in stretches
        ),
    )  # fmt: skip


def of_run(directory: RunDirectory, record: TrainedRun) -> MeasuredStep | None:
    path = directory.path / "metrics.jsonl"
    try:
        found = path.stat()
    except OSError:
        return None
    return _read(directory.path, found.st_mtime_ns, found.st_size, record.resumed_from, record.world_from)


@lru_cache(CACHED_RUNS)
def _read(
    folder: Path, changed_ns: int, size_bytes: int, resumed_from: tuple[int, ...], world_from: int
) -> MeasuredStep | None:
    try:
        return measured(RunDirectory(folder).read_lines("metrics"), resumed_from, world_from)
    except OSError:
        return None


def with_measured_step(directory: RunDirectory, record: TrainedRun) -> TrainedRun:
    found = of_run(directory, record)
    if found is None:
        return record
    tokens_per_s = record.config.tokens_per_step / found.step_s
    share = record.mfu / record.tokens_per_s if record.mfu and record.tokens_per_s else None
    return record.model_copy(
        update={
            "step_s": found.step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": share * tokens_per_s if share else record.mfu,
        }
    )
