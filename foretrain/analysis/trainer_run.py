"""A Trainer's run against its forecast: the memory of each phase, the time of a step, memory that ran out."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.advice.finetune import changes
from foretrain.advice.record import Advice
from foretrain.analysis.run import OutOfMemory, Piece, TimePiece, failure_of
from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import PLAN, TrainerRun

SCHEMA = "foretrain.explain-trainer/1"


class TrainerRunExplanation(Record):
    """The answer for one run. `forecast`: the one from before the first step, of the longest sequences that came then.

    `phases`: allocated bytes of each; `reserved`: what the allocator took for them on a card; `step`: one step, without
    the first ones; `time`: where the wall time went. `changes`: what would have saved a run that memory ended.
    """

    record: TrainerRun
    forecast: FineTunePlan | None
    forecast_seq_len: int | None = None
    phases: tuple[Piece, ...] = ()
    reserved: tuple[Piece, ...] = ()
    step: TimePiece | None = None
    predicted_tokens_per_s: float | None = None
    time: tuple[TimePiece, ...] = ()
    failures: tuple[OutOfMemory, ...] = ()
    changes: tuple[Advice, ...] = ()


def explain_directory(directory: RunDirectory) -> TrainerRunExplanation:
    """Explain the run in a directory. Raises UserError where there is none, or its records are damaged."""
    record = directory.record_of(TrainerRun)
    metrics, events = directory.read_lines("metrics", whole=False), directory.read_lines("events")
    return explain_trainer_run(record, forecast_in(directory.path), metrics, events)


def forecast_in(path: Path) -> FineTunePlan | None:
    """The forecast that was made before the first step; None where there was none. Raises UserError for a damaged
    one."""
    file = path / PLAN
    if not file.is_file():
        return None
    try:
        return FineTunePlan.from_json(read_text(file))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError("data.bad_run", path=str(file), reason=str(error).splitlines()[0]) from None


def explain_trainer_run(
    record: TrainerRun,
    forecast: FineTunePlan | None,
    metrics: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
) -> TrainerRunExplanation:
    """From a run's own records and its forecast; where longer sequences came than that was made for, with theirs."""
    first = forecast.tune.seq_len if forecast else None
    if forecast is not None and record.seq_len and record.seq_len > forecast.tune.seq_len and not _traced(forecast):
        forecast = _with_seq_len(forecast, record.seq_len)
    failures = failures_of(record, events)
    timing = forecast.timing if forecast else None
    step = None
    if record.step_s:
        predicted = timing.step_s.expected_s if timing else None
        step = TimePiece(id="steps", predicted_s=predicted, measured_s=record.step_s, count=record.steps_done)
    return TrainerRunExplanation(
        record=record, forecast=forecast, forecast_seq_len=first, phases=_phases(record, forecast),
        reserved=_phases(record, forecast, reserved=True), step=step, time=_time(record, metrics, events),
        predicted_tokens_per_s=timing.tokens_per_s if timing else None, failures=failures,
        changes=changes(forecast) if forecast and failures and failures[-1].fatal else (),
    )  # fmt: skip


def _traced(forecast: FineTunePlan) -> bool:
    return forecast.memory.source == "traced"


def _with_seq_len(forecast: FineTunePlan, seq_len: int) -> FineTunePlan:
    try:
        return replanned(forecast, seq_len=seq_len)
    except (UserError, ValueError):  # beyond what the model has positions for: the run's own business
        return forecast


def _phases(record: TrainerRun, forecast: FineTunePlan | None, *, reserved: bool = False) -> tuple[Piece, ...]:
    predicted = {phase.phase: phase for phase in forecast.memory.phases} if forecast else {}
    found = []
    for phase in record.memory.phases:
        expected = predicted.get(phase.phase)
        if phase.phase == "load" and "prepare" in predicted:  # the callback finds the model with its adapters
            expected = max(predicted["load"], predicted["prepare"], key=lambda each: each.allocated_bytes)
        measured = phase.reserved_bytes if reserved else phase.allocated_bytes
        if reserved and measured is None:
            continue
        ours = (expected.reserved_bytes if reserved else expected.allocated_bytes) if expected else None
        found.append(Piece(id=phase.phase, predicted_bytes=ours, measured_bytes=measured))
    return tuple(found)


def _time(
    record: TrainerRun, metrics: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> tuple[TimePiece, ...]:
    """Steps at their usual pace, what the first ones lost beyond it, evaluations, saves, and the rest."""

    def seconds(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
        return [float(line[key]) for line in lines if isinstance(line.get(key), int | float)]

    steps = seconds([line for line in metrics if line["kind"] == "step"], "step_s")
    evaluations = seconds([line for line in metrics if line["kind"] == "evaluation"], "evaluation_s")
    values = [event.get("values") for event in events if event.get("id") == "saved"]
    saves = seconds([value for value in values if isinstance(value, dict)], "save_s")
    found = []
    if steps:
        middle = record.step_s or median(steps)
        usual = sum(min(one, middle) for one in steps)
        found.append(TimePiece(id="steps", predicted_s=None, measured_s=usual, count=len(steps)))
        found.append(TimePiece(id="slower", predicted_s=None, measured_s=sum(steps) - usual))
    if evaluations:
        found.append(TimePiece(id="evaluation", predicted_s=None, measured_s=sum(evaluations), count=len(evaluations)))
    if saves:
        found.append(TimePiece(id="saving", predicted_s=None, measured_s=sum(saves), count=len(saves)))
    rest = record.wall_s - sum(piece.measured_s or 0.0 for piece in found)
    if found and rest > 0:
        found.append(TimePiece(id="other", predicted_s=None, measured_s=rest))
    return tuple(found)


def failures_of(record: TrainerRun, events: Sequence[dict[str, Any]]) -> tuple[OutOfMemory, ...]:
    """Every time that memory ran out; the last one ended the run where the run failed by it."""
    found = []
    for event in events:
        values = event.get("values")
        if event.get("id") == "out_of_memory" and isinstance(values, dict):
            found.append(failure_of(values))
    if found and record.status == "failed":
        found[-1] = found[-1].model_copy(update={"fatal": True})
    return tuple(found)
