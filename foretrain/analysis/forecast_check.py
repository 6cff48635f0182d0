"""Predicted against measured: a plan made before a run beside what the run's own meters say.

Errors are signed: +2 % means that the prediction was 2 % too high. Where one side has no figure there is no row.
"""

from typing import Literal

from foretrain.analysis.forecast import RanksExplained, highest, plan_now, plan_of, ranks_of
from foretrain.analysis.measured_step import of_run, with_measured_step
from foretrain.base.records import Note, Record
from foretrain.config.shape import ModelShape
from foretrain.predict.plan import Plan
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import MachineLoad, TrainedRun

SCHEMA = "foretrain.comparison/1"


class Row(Record):
    """One quantity. `low` and `high` bound the prediction where it came as a range.

    `busy`: measured while other programs used the processor, so that it cannot tell whether the forecast is right.
    """

    id: str
    kind: Literal["bytes", "seconds"]
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None
    busy: bool = False

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def in_range(self) -> bool | None:
        """Whether the measured figure is inside the stated range; None where none was stated, or it cannot tell."""
        return None if self.busy or self.low is None or self.high is None else self.low <= self.measured <= self.high


Sources = dict[Literal["bytes", "seconds"], tuple[str, ...]]  # of each kind of row: memory and time are two forecasts


class ForecastCheck(Record):
    """Of one run. `predicted_source` (memory), `time_source`, `measured_source` (memory): where figures are from.

    `ranks`: of several; tensors are then the first one's, what is reserved that of the one with most.
    """

    run_id: str
    predicted_source: str
    time_source: str | None = None
    measured_source: str
    memory: tuple[Row, ...]
    time: tuple[Row, ...]
    notes: tuple[Note, ...] = ()
    machine: MachineLoad | None = None
    ranks: RanksExplained | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, memory (bytes) before time (seconds)."""
        return self.memory + self.time

    @property
    def sources(self) -> Sources:
        return {"bytes": (self.predicted_source,), "seconds": (self.time_source,) if self.time_source else ()}


def _row(
    id: str, kind: Literal["bytes", "seconds"], predicted: float | None, measured: float | None,
    low: float | None = None, high: float | None = None,
) -> list[Row]:  # fmt: skip
    if not predicted or not measured:
        return []
    return [Row(id=id, kind=kind, predicted=predicted, measured=measured, low=low, high=high)]


def _memory(plan: Plan, run: TrainedRun) -> list[Row]:
    predicted, measured = plan.memory_of("foretrain"), run.memory
    at_peak = {c.id: c.size_bytes for c in predicted.phase("steady_step").components} if predicted.phases else {}
    sharing, shape = plan.spec("foretrain").sharing, ModelShape.of(plan.config)
    gradients = sum(sharing.share(p.shape) for p in shape.parameters()) if sharing else plan.counts.n_params
    rows = [
        *_row("component.weights", "bytes", at_peak.get("weights"), measured.weights_bytes),
        *_row("component.gradients", "bytes", 4 * gradients, measured.gradients_bytes),
        *_row("component.optimizer", "bytes", at_peak.get("optimizer"), measured.optimizer_bytes),
        *_row("component.saved", "bytes", predicted.saved_bytes, measured.saved_bytes),
    ]
    for phase in predicted.phases:
        sample = measured.phase(phase.phase)
        if sample is not None:
            rows += _row(f"phase.{phase.phase}", "bytes", phase.allocated_bytes, sample.allocated_bytes)
    most = run.highest_bytes if measured.phases else None  # of a process that has begun nothing it says nothing
    low, expected, high = highest(plan)
    id = "process.reserved" if plan.gpu.reserves else "process.resident"
    return rows + _row(id, "bytes", expected, most, low, high)


def _time(plan: Plan, run: TrainedRun) -> list[Row]:
    timing = plan.foretrain_timing
    if timing is None:
        return []
    step, total, evaluation = timing.step_s, timing.length_s, timing.evaluation_s
    rows = _row("time.step", "seconds", step.expected_s, run.step_s, step.low_s, step.high_s)
    if evaluation is not None:
        rows += _row(
            "time.evaluation",
            "seconds",
            evaluation.expected_s,
            run.evaluation_s,
            evaluation.low_s,
            evaluation.high_s,
        )
    if run.status == "finished" and not run.resumed_from:
        rows += _row("time.run", "seconds", total.expected_s, run.wall_s, total.low_s, total.high_s)
    busy = run.machine is not None and run.machine.busy
    return [row.model_copy(update={"busy": busy}) for row in rows]


def of_directory(directory: RunDirectory) -> tuple[TrainedRun, Plan, ForecastCheck]:
    """(record, plan, both beside each other) of a run; the time of its step is that of every command. Raises UserError.

    The plan is the one that was made before the run, else the same plan made now.
    """
    record = directory.read_record()
    plan = plan_of(directory.path, record)
    step = of_run(directory, record)
    record = with_measured_step(directory, record)
    notes = (step.note,) if step and step.note else ()
    return record, plan, check_forecast(plan, record).model_copy(update={"notes": notes})


def in_the_end(record: TrainedRun, made: Plan) -> Plan:
    """The plan of a run, of the micro-batch that it trained with in the end: `made` was of one that did not last."""
    return made if record.shrunk_from is None else plan_now(record)


def check_forecast(plan: Plan, run: TrainedRun) -> ForecastCheck:
    """How far a plan was off: each figure of it beside what the run measured; what it did not measure has no row.
    Memory is in bytes, time in seconds."""
    source = plan.memory_of("foretrain").source
    return ForecastCheck(
        run_id=run.id,
        predicted_source=source,
        time_source=plan.foretrain_timing.source if plan.foretrain_timing else None,
        measured_source=run.memory.method,
        memory=tuple(_memory(plan, run)),
        time=tuple(_time(plan, run)),
        machine=run.machine,
        ranks=ranks_of(run, plan, run.step_s),
    )
