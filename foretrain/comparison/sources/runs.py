"""A run as a subject, whoever trained it, fully measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.analysis.log_analysis import config_of, of_watched
from foretrain.analysis.measured_step import measured, starts_of, steady_times, step_lines
from foretrain.analysis.run_pace import logged_steps, much_is_lost
from foretrain.base.errors import UserError
from foretrain.comparison import settings
from foretrain.comparison.sources.logs import of_log
from foretrain.comparison.sources.plans import bytes_per_token, here
from foretrain.comparison.sources.request import SourceRequest, card_named
from foretrain.comparison.subject import Curve, Memory, Subject, curve, exact
from foretrain.data.dataset import BUILT_IN
from foretrain.predict.plan import Note
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import LOG, RunRecord, TrainedRun, TrainerRun, WatchedRun, folder_of, source_of
from foretrain.runs.training_log import read_log

Lines = Sequence[dict[str, Any]]  # of metrics.jsonl


def is_watched(path: Path, head: bytes) -> bool:
    return source_of(folder_of(path)) == "watched"


def claims(path: Path, head: bytes) -> bool:
    return path.is_dir() or source_of(folder_of(path)) is not None


def load(given: SourceRequest) -> Subject:
    return of(given, RunDirectory(folder_of(Path(given.path))))


def of(given: SourceRequest, directory: RunDirectory, metrics: Lines | None = None) -> Subject:
    """Load the run in this directory. `metrics`: its lines, if already read. Raises UserError as `load`."""
    record = directory.any_record()
    if isinstance(record, WatchedRun):
        return _of_output(given, directory.path, record)
    if given.words:
        raise UserError("usage.source_has_config", path=given.path)
    trained = record if isinstance(record, TrainedRun) else None
    lines = directory.read_lines("metrics", whole=trained is not None) if metrics is None else metrics
    subject = Subject(
        label=given.name if trained else given.label or record.name, path=given.path, kind="run",
        used_by_others_bytes=given.held_bytes, memory=_memory(record), wall_s=record.wall_s or None,
        notes=_notes(record, lines), train=_curve(lines, "step" if trained else "log", "loss"),
        val=_curve(lines, "evaluation", "val_loss"), diverged=record.status == "diverged",
    )  # fmt: skip
    if trained:
        return _with_config(given, replace(subject, scores=directory.scores()), trained, lines)
    return _of_trainer(given, subject, record, lines) if isinstance(record, TrainerRun) else subject


def _with_config(given: SourceRequest, subject: Subject, record: TrainedRun, metrics: Lines) -> Subject:
    lines = [line for line in step_lines(metrics) if line["step"] >= record.world_from]
    times, since = _times(lines, starts_of(lines, record.resumed_from))
    if not times and record.step_s:
        times, since = (record.step_s,), ()
    config = record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype})
    known = settings.of_config(config, record.gpu, "foretrain") | _data(record) | {settings.RANKS: record.world}
    subject = replace(
        subject, settings=known, config=config, gpu=record.gpu, step="foretrain", step_times_s=times,
        steps_since_start=since, tokens_per_step=config.tokens_per_step, world=record.world, devices=record.devices,
        bytes_per_token=bytes_per_token(given, config, record.dataset.tokenizer or ""),
    )  # fmt: skip
    return subject.with_speed(exact(median(times)), "measured") if times else replace(subject, mfu=record.mfu)


def _of_trainer(given: SourceRequest, subject: Subject, record: TrainerRun, metrics: Lines) -> Subject:
    lines = [line for line in metrics if line["kind"] == "step" and isinstance(line.get("step_s"), int | float)]
    times, since = _times(lines)
    gpu = card_named(record.device) if record.kind == "cuda" else None  # a CPU may have been another machine's
    known = {
        **settings.of_options(record.settings),
        "program": record.trainer,
        "parameters": record.n_params,
        **settings.of_gpu(gpu),
    }
    tokens = [line["tokens"] for line in lines if line.get("tokens")]
    return replace(
        subject, settings=known, gpu=gpu, tokens_per_step=round(sum(tokens) / len(tokens)) if tokens else None,
        bytes_per_token=given.number("bytes_per_token", 0.01, 100), step_times_s=times, steps_since_start=since,
        step_s=exact(record.step_s) if record.step_s else None, step_source="measured" if record.step_s else None,
    )  # fmt: skip


def _of_output(given: SourceRequest, path: Path, record: WatchedRun) -> Subject:
    log, config, used = read_log(path / LOG), None, record.busiest
    if log.program.has_config:
        config = config_of(given.resolved, log, here) or of_watched(record.config, log)
    subject = of_log(given, log, config, card_named(record.device_name))
    stated = "used_by_others" in given.own or given.used_by_others_bytes
    others = used.used_by_others_peak_bytes if used and not stated else None
    return replace(
        subject, memory=_memory(record) or subject.memory, wall_s=record.wall_s or subject.wall_s,
        used_by_others_bytes=subject.used_by_others_bytes if others is None else others,
    )  # fmt: skip


def _times(lines: Lines, starts: list[int] | None = None) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return steady_times([line["step"] for line in lines], [float(line["step_s"]) for line in lines], starts)


def _curve(lines: Lines, kind: str, key: str) -> Curve:
    """Return the losses of one kind of line; a line without a time takes that of the one before it."""
    points: list[tuple[int, float, float | None]] = []
    elapsed_s = 0.0
    for line in lines:
        elapsed_s = float(line.get("elapsed_s") or elapsed_s)
        if line["kind"] == kind and isinstance(line.get(key), int | float):
            points.append((line["step"], float(line[key]), elapsed_s))
    return curve(points)


def _data(record: TrainedRun) -> dict[str, Any]:
    info = record.dataset
    found = {settings.CONTENTS: info.fingerprint[:8]} if info.fingerprint else {}
    return found | ({"tokenizer": info.tokenizer} if info.tokenizer and record.config.dataset != BUILT_IN else {})


def _memory(record: RunRecord) -> Memory | None:
    highest = record.highest_bytes
    if highest is None:
        return None
    what = "reserved" if record.reserves else "process"
    return Memory(low_bytes=highest, expected_bytes=highest, high_bytes=highest, source="measured", what=what)


def _notes(record: RunRecord, lines: Lines) -> tuple[Note, ...]:
    notes = []
    if record.status != "finished":
        notes.append(Note(id="unfinished", values={"status": record.status, "steps": record.steps_done}))
    if not isinstance(record, TrainedRun):
        return tuple(notes)
    changed = found.note if (found := measured(lines, record.resumed_from, record.world_from)) else None
    notes += [changed] if changed else []
    if record.worlds:
        notes.append(Note(id="ranks_changed", values={"ranks": record.world, "step": record.world_from}))
    there, expected = logged_steps(record, lines)
    if much_is_lost(there, expected):
        notes.append(Note(id="steps_lost", values={"there": there, "expected": expected}))
    return tuple(notes)
