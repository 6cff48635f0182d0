"""A log as a subject: measured speed, losses and memory; with its config also planned memory."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretrain.analysis.log_analysis import (
    config_of,
    log_interval,
    mean_step_s,
    memory_of,
    pace_of,
    printed,
    tokens_of_step,
)
from foretrain.analysis.log_checks import findings
from foretrain.analysis.measured_step import since_start
from foretrain.comparison import settings
from foretrain.comparison.sources.plans import bytes_per_token, here, with_forecast
from foretrain.comparison.sources.request import SourceRequest, card_named
from foretrain.comparison.subject import Curve, Memory, Subject, curve, exact
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import Note
from foretrain.runs.training_log import TrainingLog, read_log


def claims(path: Path, head: bytes) -> bool:
    """Claim everything: the reader reports what is not a log."""
    return True


def load(given: SourceRequest) -> Subject:
    log = read_log(Path(given.path))
    own = log if log.program.has_config else None
    return of_log(given, log, config_of(given.resolved, own, here) if own else None)


def of_log(given: SourceRequest, log: TrainingLog, config: RunConfig | None, seen: Gpu | None = None) -> Subject:
    pace = pace_of(log, config)
    step_s = pace.median_s if pace else mean_step_s(log)
    tokens, _ = tokens_of_step(log, config)
    gpu = given.card or seen or card_named(log.header.gpu_name)
    train, val = _curves(log, step_s)
    ends = zip(reversed(log.steps.lost), reversed(log.steps.loss), strict=True)
    stated = given.number("tokens_per_step", 1, 10**13)
    subject = Subject(
        label=given.name, path=given.path, kind="log", settings=_settings(log, gpu, config), gpu=gpu,
        tokens_per_step=int(stated) if stated else tokens, bytes_per_token=bytes_per_token(given, config),
        step_times_s=tuple(log.steps.time_s[i] for i in pace.indices) if pace else (),
        steps_since_start=since_start(log, pace.indices) if pace else (), step_s=exact(step_s) if step_s else None,
        step_source="measured (log)" if step_s else None, memory=_memory(log),
        used_by_others_bytes=given.held_bytes, train=train, val=val,
        val_unit=log.program.val_unit,
        train_unit=log.program.val_unit if log.program.val_unit != "bits a byte" else "nats per token",
        wall_s=train.seconds_s[-1] if train.seconds_s else None,
        printed_mfu=next((m for m in reversed(log.steps.logged_mfu) if math.isfinite(m)), None), notes=_notes(log),
        diverged=next((lost == 1 for lost, loss in ends if lost or math.isfinite(loss)), False),
    )  # fmt: skip
    if config is None:
        return subject
    subject = with_forecast(subject, config, gpu, "nanogpt")
    return replace(subject, notes=subject.notes + _doubts(log, subject, step_s))


def _memory(log: TrainingLog) -> Memory | None:
    """Return the allocator's reserved peak. Other figures leave out its cache."""
    found = memory_of(log.header)
    if found is None or found.reserved_bytes is None:
        return None
    most = found.reserved_bytes
    return Memory(low_bytes=most, expected_bytes=most, high_bytes=most, source="measured (log)", what="reserved")


def _settings(log: TrainingLog, gpu: Gpu | None, config: RunConfig | None) -> dict[str, Any]:
    unit = log.program.val_unit
    found: dict[str, Any] = {"program": f"{log.format}, {unit}" if unit.endswith("loss") else log.format}
    if config is None:
        found |= printed(log)
    if log.header.tokens_per_step:
        found["tokens_per_step"] = log.header.tokens_per_step
    if log.header.vocab_size:
        found["vocab_size"] = log.header.vocab_size
    return found | settings.of_gpu(gpu)


def _curves(log: TrainingLog, steady_s: float | None) -> tuple[Curve, Curve]:
    """Return (training, validation) with the time since the start; unprinted steps took the steady or mean time."""
    if steady_s is None:
        at_steps = [(number, loss, None) for number, loss in zip(log.steps.number, log.steps.loss, strict=True)]
        lost = [(one.step, math.nan if one.val_loss is None else one.val_loss, None) for one in log.evaluations]
        return curve(at_steps), curve(lost)
    interval, elapsed_s = log_interval(log), 0.0
    training: list[tuple[int, float, float | None]] = []
    for segment in log.steps.segments():
        last = None
        for i in segment:
            number, time_s = log.steps.number[i], log.steps.time_s[i]
            unprinted = (number - last if last is not None else min(interval, number + 1)) - 1
            time_s = time_s if math.isfinite(time_s) else steady_s
            elapsed_s += unprinted * (time_s if log.program.mean_times else steady_s) + time_s
            training.append((number, log.steps.loss[i], elapsed_s))
            last = number
    numbers = [number for number, _, _ in training]
    evaluations: list[tuple[int, float, float | None]] = []
    at = 0
    for evaluation in log.evaluations:
        while at + 1 < len(numbers) and numbers[at] < evaluation.step:
            at += 1
        near_s = (training[at][2] or 0.0) + (evaluation.step - numbers[at]) * steady_s
        loss = evaluation.val_loss if evaluation.val_loss is not None else math.nan
        evaluations.append((evaluation.step, loss, max(0.0, near_s)))
    return curve(training), curve(evaluations)


def _notes(log: TrainingLog) -> tuple[Note, ...]:
    lost = sum(log.steps.lost)
    if not lost:
        return ()
    first = next(log.steps.number[i] for i, lost_here in enumerate(log.steps.lost) if lost_here)
    return (Note(id="not_finite", values={"count": lost, "first": first}),)


def _doubts(log: TrainingLog, subject: Subject, steady_s: float | None) -> tuple[Note, ...]:
    found = findings(log, subject.config, subject.config, subject.used, steady_s, log_interval(log))
    doubtful = [finding for finding in found if finding.tone == "bad"]
    return (Note(id="other_config", values={"count": len(doubtful)}),) if doubtful else ()
