"""How long a step of a run took: one definition, for `runs`, `compare`, `explain`, `report` and the page.

It is the median of the run's steady steps as metrics.jsonl has them: without the first steps of each start, without
slow-downs that last, and without single slow steps. Of a run that was stopped and resumed, every start counts that had
as many ranks as the last one.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.analysis.log_steady import Pace, log_of, steady
from foretrain.base.records import Note, Record
from foretrain.training.store import RunDirectory, RunRecord

CHANGED = 1.15  # how far the starts of a run are apart that is said to have changed its speed
CACHED_RUNS = 512


class Start(Record):
    """A stretch of a run between two starts of its process. `step_s`: its median, without its first line."""

    first_step: int
    last_step: int
    step_s: float


class MeasuredStep(Record):
    """The time of a step, and of each start by itself."""

    step_s: float
    starts: tuple[Start, ...]

    @property
    def note(self) -> Note | None:
        """That the speed changed when the run was resumed, with the slowest and the fastest start."""
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
    """The lines of metrics.jsonl that have the time of a step."""
    return [line for line in metrics if line.get("kind") == "step" and 0 < line.get("step_s", 0) < 1e9]


def starts_of(lines: Sequence[dict[str, Any]], resumed_from: tuple[int, ...]) -> list[int]:
    """The lines with which the run began, and began again."""
    return [
        i
        for i, line in enumerate(lines)
        if i == 0
        or line["step"] <= lines[i - 1]["step"]
        or any(lines[i - 1]["step"] < start <= line["step"] for start in resumed_from)
    ]


def pace_of_lines(lines: Sequence[dict[str, Any]], starts: list[int]) -> Pace:
    """The steady steps among these lines. Evaluations are not within their times."""
    return steady(log_of([line["step"] for line in lines], [line["step_s"] for line in lines], starts), None)


def measured(
    metrics: Sequence[dict[str, Any]], resumed_from: tuple[int, ...], world_from: int = 0
) -> MeasuredStep | None:
    """The measured step of a run by its metrics; None where no step was logged. `world_from`: the step from which on as
    many ranks trained as in the end."""
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


def of_run(directory: RunDirectory, record: RunRecord) -> MeasuredStep | None:
    """The measured step of a run; its metrics are read once for each state of the file."""
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


def with_measured_step(directory: RunDirectory, record: RunRecord) -> RunRecord:
    """The record with this time of a step, and the speed and MFU that follow; as it is where no step was logged."""
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
