"""A run directory of foretrain's as a subject: everything in it was measured."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.analysis.measured_step import log_of, measured, pace_of_lines, starts_of, steady, step_lines
from foretrain.analysis.run_pace import logged_steps, much_is_lost
from foretrain.base.errors import UserError
from foretrain.comparison import settings
from foretrain.comparison.sources.given import Given
from foretrain.comparison.sources.predicted import bytes_per_token
from foretrain.comparison.subject import Memory, Subject, curve, exact
from foretrain.data.dataset import BUILT_IN
from foretrain.predict.plan import Note
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun, folder_of, source_of
from foretrain.runs.training_log import TrainingLog


def claims(path: Path, head: bytes) -> bool:
    """A directory, or the record in it."""
    return path.is_dir() or source_of(folder_of(path)) == "trained"


def load(given: Given) -> Subject:
    """The run. Raises UserError where there is none, or its record is damaged."""
    if given.words:
        raise UserError("usage.source_has_config", path=given.path)
    return of(given, RunDirectory(folder_of(Path(given.path))))


def of(given: Given, directory: RunDirectory, metrics: list[dict[str, Any]] | None = None) -> Subject:
    """The run in this directory. `metrics`: its lines, where they were read before. Raises UserError as `load`."""
    record = directory.read_record()
    lines = directory.read_lines("metrics") if metrics is None else metrics
    times, since = _steady([line for line in step_lines(lines) if line["step"] >= record.world_from], record)
    config = record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype})
    known = settings.of_config(config, record.gpu, "foretrain") | _data(record) | {settings.RANKS: record.world}
    if not times and record.step_s:
        times, since = (record.step_s,), ()
    byte_share = bytes_per_token(given, config, record.dataset.tokenizer or "")
    middle = median(times) if times else None
    subject = Subject(
        label=given.name, path=given.path, kind="run", settings=known, config=config, gpu=record.gpu, step="foretrain",
        tokens_per_step=config.tokens_per_step, bytes_per_token=byte_share, step_times_s=times,
        steps_since_start=since, used_by_others_bytes=given.held_bytes,
        memory=_memory(record), wall_s=record.wall_s or None, world=record.world, devices=record.devices,
        scores=directory.scores(),
        notes=_notes(record, lines), train=_curve(lines, "step", "loss"), val=_curve(lines, "evaluation", "val_loss"),
    )  # fmt: skip
    return subject.with_speed(exact(middle), "measured") if middle else replace(subject, mfu=record.mfu)


def steady_times(numbers: list[int], times_s: list[float]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(the steady ones of these step times, which step since its start each was): without warm-up, slow-downs and
    spikes, as `explain` counts them."""
    times = [time_s if 0 < time_s < 1e9 else math.nan for time_s in times_s]
    if not any(math.isfinite(time_s) for time_s in times):
        return (), ()
    starts = [i for i, number in enumerate(numbers) if i == 0 or number <= numbers[i - 1]]
    log = log_of(numbers, times, starts)
    kept = steady(log, None).indices
    return tuple(times[i] for i in kept), since_start(log, kept)


def since_start(log: TrainingLog, indices: Sequence[int]) -> tuple[int, ...]:
    """How many steps after the first one of its segment each of these was."""
    firsts = {i: log.steps.number[segment[0]] for segment in log.steps.segments() for i in segment}
    return tuple(log.steps.number[i] - firsts[i] for i in indices)


def _steady(lines: list[dict[str, Any]], record: TrainedRun) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(the steady step times, which step since its start each was), as every command counts them."""
    if not lines:
        return (), ()
    starts = starts_of(lines, record.resumed_from)
    kept = pace_of_lines(lines, starts).indices
    log = log_of([line["step"] for line in lines], [float(line["step_s"]) for line in lines], starts)
    return tuple(log.steps.time_s[i] for i in kept), since_start(log, kept)


def _curve(lines: list[dict[str, Any]], kind: str, key: str) -> Any:
    """Losses of one kind of line; an evaluation has no time of its own and takes that of the step before it."""
    points: list[tuple[int, float, float | None]] = []
    elapsed_s = 0.0
    for line in lines:
        elapsed_s = float(line.get("elapsed_s", elapsed_s))
        if line["kind"] == kind:
            points.append((line["step"], float(line[key]), elapsed_s))
    return curve(points)


def _data(record: TrainedRun) -> dict[str, Any]:
    """What was trained on."""
    info = record.dataset
    found = {settings.CONTENTS: info.fingerprint[:8]} if info.fingerprint else {}
    return found | ({"tokenizer": info.tokenizer} if info.tokenizer and record.config.dataset != BUILT_IN else {})


def _memory(record: TrainedRun) -> Memory | None:
    """The highest moment: what the allocator reserved on a card, the process on a CPU."""
    highest = record.highest_bytes
    if highest is None:
        return None
    what = "reserved" if record.gpu.reserves else "process"
    return Memory(low_bytes=highest, expected_bytes=highest, high_bytes=highest, source="measured", what=what)


def _notes(record: TrainedRun, lines: list[dict[str, Any]]) -> tuple[Note, ...]:
    notes = []
    if record.status != "finished":
        notes.append(Note(id="unfinished", values={"status": record.status, "steps": record.steps_done}))
    changed = found.note if (found := measured(lines, record.resumed_from, record.world_from)) else None
    notes += [changed] if changed else []
    if record.worlds:
        notes.append(Note(id="ranks_changed", values={"ranks": record.world, "step": record.world_from}))
    there, expected = logged_steps(record, lines)
    if much_is_lost(there, expected):
        notes.append(Note(id="steps_lost", values={"there": there, "expected": expected}))
    return tuple(notes)
