"""A plan from before a run beside the run's own meters; +2% means that the prediction was 2% too high."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from foretrain.analysis.measured_step import of_run, with_measured_step
from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.records import Note, Record
from foretrain.config.options import StrategyName
from foretrain.config.shape import ModelShape
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.plan import Plan, plan
from foretrain.predict.ranks import of_run as with_ranks
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import PLAN, MachineLoad, RankFigures, TrainedRun
from foretrain.training.place import LEAST_S, slow

SCHEMA = "foretrain.compare/1#forecast"


def plan_of(run: Path, record: TrainedRun) -> Plan:
    """Read the plan beside a run's record, or make one for this number of ranks. Raises UserError 'data.bad_plan'."""
    path = run / PLAN
    if path.is_file():
        try:
            made = Plan.from_json(read_text(path))
        except (OSError, ValidationError, ValueError, RecursionError) as error:
            raise UserError("data.bad_plan", path=str(path), reason=str(error).splitlines()[0]) from None
        if made.world == record.world:
            return made
    return plan_now(record)


def forecast_in(path: Path) -> FineTunePlan | None:
    file = path / PLAN
    if not file.is_file():
        return None
    try:
        return FineTunePlan.from_json(read_text(file))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError("data.bad_run", path=str(file), reason=str(error).splitlines()[0]) from None


def plan_now(record: TrainedRun) -> Plan:
    config = record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype})
    made = plan(config, record.gpu, name=record.name, dataset_tokens=record.dataset.train_tokens)
    return with_ranks(made, record.world, record.per_node) if record.world > 1 else made


def highest(plan: Plan) -> tuple[int, int, int]:
    """Return (low, expected, high) of a run's measured peak: the allocator's on a GPU, the process's on a CPU."""
    memory = plan.memory_of("foretrain")
    low, expected, high = memory.neediest.needed_span
    if not plan.gpu.reserves:
        return low, expected, high
    held = memory.context
    return low - held.low_bytes, expected - held.expected_bytes, high - held.high_bytes


class RankPart(Record):
    """One rank. `highest_bytes`: its allocator's reserved peak on a card, its process's on a CPU.
    `evaluates_tokens_per_s`: of its part of an evaluation; `behind`: its share below the median there."""

    rank: int
    host: str
    card: str
    allocated_bytes: int | None
    highest_bytes: int | None
    step_s: float | None
    data_wait_s: float | None
    evaluates_tokens_per_s: float | None
    behind: float | None = None


class Stretch(Record):
    first_step: int
    world: int


class RanksExplained(Record):
    """A run on several ranks, with speeds of their last number; ranks on a CPU share their machine's `devices`.

    The forecast is of the rank with the most to hold. `most`: the rank that measured most. `told`: evaluations took
    long enough to tell who is slow.
    """

    world: int
    devices: int
    machines: int
    strategy: StrategyName
    tokens_per_s: float | None
    predicted_tokens_per_s: float | None
    predicted_allocated_bytes: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    what: Literal["reserved", "process"]
    parts: tuple[RankPart, ...]
    most: int | None
    slow: tuple[int, ...]
    reported: bool
    stretches: tuple[Stretch, ...] = ()

    @property
    def card_tokens_per_s(self) -> float | None:
        return self.tokens_per_s / self.devices if self.tokens_per_s and self.devices == self.world else None


def ranks_of(record: TrainedRun, plan: Plan, step_s: float | None) -> RanksExplained | None:
    """Return the measurements of a run's ranks; None where one rank has always trained. `step_s`: steady."""
    if record.world == 1 and not record.worlds:
        return None
    behind = {figures.rank: share for figures, share in slow(record.ranks)}
    parts = tuple(_part(figures, record, behind.get(figures.rank)) for figures in record.ranks)
    most = max(parts, key=lambda part: (part.highest_bytes or 0, part.allocated_bytes or 0), default=None)
    low, expected, high = highest(plan)
    return RanksExplained(
        world=record.world, devices=record.devices, machines=max(1, record.world // record.per_node),
        strategy=record.config.strategy, tokens_per_s=record.config.tokens_per_step / step_s if step_s else None,
        predicted_tokens_per_s=plan.foretrain_timing.tokens_per_s if plan.foretrain_timing else None,
        predicted_allocated_bytes=plan.memory_of("foretrain").worst.allocated_bytes, predicted_bytes=expected,
        low_bytes=low, high_bytes=high, what="reserved" if record.gpu.kind == "cuda" else "process", parts=parts,
        most=most.rank if most else None, slow=tuple(behind),
        reported=max((figures.evaluated_s for figures in record.ranks), default=0.0) >= LEAST_S,
        stretches=tuple(Stretch(first_step=first, world=world) for first, world in record.worlds),
    )  # fmt: skip


def _part(figures: RankFigures, record: TrainedRun, behind: float | None) -> RankPart:
    tokens_per_s = figures.evaluated_tokens / figures.evaluated_s if figures.evaluated_s else None
    return RankPart(
        rank=figures.rank, host=figures.host, card=figures.card, allocated_bytes=figures.allocated_bytes,
        highest_bytes=figures.reserved_bytes if record.gpu.kind == "cuda" else figures.process_bytes,
        step_s=figures.step_s, data_wait_s=figures.data_wait_s, evaluates_tokens_per_s=tokens_per_s, behind=behind,
    )  # fmt: skip


class Row(Record):
    """One quantity, and its predicted range. `busy`: other programs ran, so that it cannot test the forecast."""

    id: str
    kind: Literal["bytes", "seconds"]
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None
    busy: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def in_range(self) -> bool | None:
        return None if self.busy or self.low is None or self.high is None else self.low <= self.measured <= self.high


Sources = dict[Literal["bytes", "seconds"], tuple[str, ...]]  # of each kind of row: memory and time are two forecasts


class ForecastCheck(Record):
    """One run, and its figures' source. `ranks`: of several; tensors are then the first one's, reserved the peak."""

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
    most = run.highest_bytes if measured.phases else None  # a process that has begun nothing tells nothing about it
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
            "time.evaluation", "seconds", evaluation.expected_s, run.evaluation_s, evaluation.low_s, evaluation.high_s
        )
    if run.status == "finished" and not run.resumed_from:
        rows += _row("time.run", "seconds", total.expected_s, run.wall_s, total.low_s, total.high_s)
    busy = run.machine is not None and run.machine.busy
    return [row.model_copy(update={"busy": busy}) for row in rows]


def of_directory(directory: RunDirectory) -> tuple[TrainedRun, Plan, ForecastCheck]:
    """Return (record, the plan from before the run or made now, their comparison). Raises UserError."""
    record = directory.read_record()
    plan = plan_of(directory.path, record)
    step = of_run(directory, record)
    record = with_measured_step(directory, record)
    notes = (step.note,) if step and step.note else ()
    return record, plan, check_forecast(plan, record).model_copy(update={"notes": notes})


def in_the_end(record: TrainedRun, made: Plan) -> Plan:
    """Return the plan of the run's last micro-batch: `made` was for one that did not fit."""
    return made if record.shrunk_from is None else plan_now(record)


def check_forecast(plan: Plan, run: TrainedRun) -> ForecastCheck:
    """Compare each figure of a plan with what the run measured, in bytes and seconds."""
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
