"""A run's memory and time: predicted beside measured, piece by piece, and what went wrong."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from foretrain.advice.advisor import remedies
from foretrain.advice.finetune import changes
from foretrain.advice.record import Advice
from foretrain.analysis.forecast_check import RanksExplained, Row, forecast_in, ranks_of
from foretrain.analysis.measured_step import measured, step_lines
from foretrain.analysis.run_pace import RunLimit, RunPace, calibration_here, limit_of_run, logged_steps, pace_of
from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.plan import Plan
from foretrain.predict.timing import Timing
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import MachineLoad, MeasuredPhase, RunRecord, Scores, Status, TrainedRun, TrainerRun

SCHEMA = "foretrain.explain/1"
Lines = Sequence[dict[str, Any]]  # of metrics.jsonl or events.jsonl
STEP_PHASES = ("steady_step", "first_step")


class Piece(Record):
    id: str
    predicted_bytes: int | None
    measured_bytes: int | None
    sum: bool = False


class TimePiece(Record):
    id: str
    predicted_s: float | None
    measured_s: float | None
    count: int = 0
    inside: bool = False


class OutOfMemory(Record):
    """One out-of-memory error, as the run recorded it; None where unknown.

    `over_bytes`: the request beyond what was left. `unused_bytes`: reserved by PyTorch and not allocated.
    `context_bytes`: of the run's process besides that. `outside_bytes`: in use besides what PyTorch reserved.
    `rest_bytes`: activations, logits, temporaries. `fatal`: it ended the run.
    """

    phase: str
    moment: str
    step: int
    micro_step: int
    fatal: bool
    asked_bytes: int | None = None
    free_bytes: int | None = None
    over_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None
    context_bytes: int | None = None
    used_by_others_bytes: int | None = None
    outside_bytes: int | None = None
    card_bytes: int | None = None
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    rest_bytes: int | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    expandable_segments: bool = True

    @property
    def fragmented(self) -> bool:
        if self.asked_bytes is None or self.unused_bytes is None or self.free_bytes is None:
            return False
        return self.unused_bytes + self.free_bytes >= self.asked_bytes


class RunExplanation(Record):
    """The answer for one run. `phase`: the one whose memory the pieces are of.

    `steps_logged` of `steps_to_log` are in metrics.jsonl. `step`: the steady one. `ranks`: of several; `memory` and
    `phases` are the first one's. `limit`: how near the steady step is to what the device can do; `calibrate_first`:
    unknown, as the device was never calibrated.
    """

    run_id: str
    name: str
    status: Status
    reason: str
    steps_done: int
    steps_logged: int
    steps_to_log: int
    gpu_name: str
    compiled: bool
    predicted_source: str
    time_source: str | None
    measured_source: str
    phase: str | None
    memory: tuple[Piece, ...]
    phases: tuple[Piece, ...]
    time: tuple[TimePiece, ...]
    wall_s: float
    pace: RunPace | None
    process: Row | None = None
    step: Row | None = None
    notes: tuple[Note, ...] = ()
    machine: MachineLoad | None = None
    ranks: RanksExplained | None = None
    failures: tuple[OutOfMemory, ...]
    survived: int
    remedies: tuple[Advice, ...]
    limit: RunLimit | None = None
    calibrate_first: bool = False
    scores: tuple[Scores, ...] = ()


def explain_run(
    record: TrainedRun, plan: Plan, metrics: list[dict[str, Any]], events: list[dict[str, Any]]
) -> RunExplanation:
    pace = pace_of(
        metrics, record.resumed_from, compiled=record.compiled, world_from=record.world_from, world=record.world
    )
    failures = failures_of(record, events)
    memory = plan.memory_of("foretrain")
    phase = _phase(record)
    logged, to_log = logged_steps(record, metrics)
    calibration = calibration_here(record.gpu)
    pieces = _memory(plan, record, phase)
    return RunExplanation(
        run_id=record.id, name=record.name, status=record.status, reason=record.reason, steps_done=record.steps_done,
        steps_logged=logged, steps_to_log=to_log, gpu_name=record.gpu.name, compiled=record.compiled,
        predicted_source=memory.source, time_source=plan.foretrain_timing.source if plan.foretrain_timing else None,
        measured_source=record.memory.method,
        phase=phase.phase if phase else None, memory=pieces, phases=_phases(plan, record),
        time=_time(plan, record, metrics, events, pace), wall_s=record.wall_s, pace=pace,
        process=_process(plan, pieces[-1]), step=_step(plan, pace, record.machine),
        notes=_notes(record, metrics), machine=record.machine, failures=failures,
        ranks=ranks_of(record, plan, pace.steady_s if pace else None),
        survived=sum(not failure.fatal for failure in failures), remedies=_remedies(record, failures),
        limit=limit_of_run(record, pace.steady_s, calibration) if pace and calibration else None,
        calibrate_first=pace is not None and calibration is None and record.world == 1 and record.gpu.kind != "mps",
    )  # fmt: skip


def _phase(record: TrainedRun) -> MeasuredPhase | None:
    found = (record.memory.phase(name) for name in STEP_PHASES)
    return next((phase for phase in found if phase is not None and phase.allocated_bytes), None)


def _memory(plan: Plan, record: TrainedRun, phase: MeasuredPhase | None) -> tuple[Piece, ...]:
    memory, measured = plan.memory_of("foretrain"), record.memory
    predicted = next((p for p in memory.phases if phase is not None and p.phase == phase.phase), memory.worst)
    at_peak = {component.id: component.size_bytes for component in predicted.components}
    weights, optimizer = at_peak.get("weights"), at_peak.get("optimizer", 0)
    peak = phase.allocated_bytes if phase else None
    # The states appear at the end of the first step; an earlier peak does not hold them.
    states = measured.optimizer_bytes if optimizer else 0
    pieces = [
        Piece(id="weights", predicted_bytes=weights, measured_bytes=measured.weights_bytes),
        Piece(id="optimizer", predicted_bytes=optimizer, measured_bytes=states),
        Piece(
            id="rest", predicted_bytes=_less(predicted.allocated_bytes, weights, optimizer),
            measured_bytes=_less(peak, measured.weights_bytes, states),
        ),
        Piece(id="peak", predicted_bytes=predicted.allocated_bytes, measured_bytes=peak, sum=True),
    ]  # fmt: skip
    reserved = phase.reserved_bytes if phase else None
    if reserved is not None and peak is not None:
        expected = predicted.needed_expected_bytes - memory.context.expected_bytes
        pieces.append(
            Piece(id="slack", predicted_bytes=expected - predicted.allocated_bytes, measured_bytes=reserved - peak)
        )
        pieces.append(Piece(id="reserved", predicted_bytes=expected, measured_bytes=reserved, sum=True))
        pieces.append(Piece(id="context", predicted_bytes=memory.context.expected_bytes, measured_bytes=None))
    process = None if reserved is not None else measured.process_peak_bytes
    pieces.append(Piece(id="process", predicted_bytes=memory.needed_bytes, measured_bytes=process, sum=True))
    return tuple(pieces)


def _process(plan: Plan, piece: Piece) -> Row | None:
    if not piece.predicted_bytes or not piece.measured_bytes:
        return None
    most = plan.memory_of("foretrain").neediest
    return Row(
        id="process.resident", kind="bytes", predicted=piece.predicted_bytes, measured=piece.measured_bytes,
        low=most.needed_low_bytes, high=most.needed_high_bytes,
    )  # fmt: skip


def _less(total: int | None, *parts: int | None) -> int | None:
    if total is None or any(part is None for part in parts):
        return None
    return total - sum(part or 0 for part in parts)


def _phases(plan: Plan, record: TrainedRun) -> tuple[Piece, ...]:
    predicted = {phase.phase: phase.allocated_bytes for phase in plan.memory_of("foretrain").phases}
    return tuple(
        Piece(id=phase.phase, predicted_bytes=predicted.get(phase.phase), measured_bytes=phase.allocated_bytes)
        for phase in record.memory.phases
    )


def _numbers(lines: Iterable[dict[str, Any]], key: str) -> list[float]:
    found = (line.get(key) for line in lines)
    return [float(value) for value in found if isinstance(value, int | float)]


def _asides(metrics: Lines, events: Lines, timing: Timing | None = None) -> list[TimePiece]:
    values = (event.get("values") for event in events if event.get("id") == "saved")
    saves = _numbers((each for each in values if isinstance(each, dict)), "save_s")
    evaluations = _numbers((line for line in metrics if line.get("kind") == "evaluation"), "evaluation_s")
    pieces = []
    for id, spent, each in (
        ("evaluation", evaluations, timing and timing.evaluation_s),
        ("saving", saves, timing and timing.save_s),
    ):
        if spent:
            predicted = each.expected_s * len(spent) if each else None
            pieces.append(TimePiece(id=id, predicted_s=predicted, measured_s=sum(spent), count=len(spent)))
    return pieces


def _time(
    plan: Plan, record: TrainedRun, metrics: list[dict[str, Any]], events: list[dict[str, Any]], pace: RunPace | None
) -> tuple[TimePiece, ...]:
    timing, wall = plan.foretrain_timing, record.wall_s
    pieces: list[TimePiece] = []
    earlier = _earlier(metrics, record.world_from)
    if pace is not None:
        steps = pace.counted_steps
        predicted = timing.step_s.expected_s * steps if timing else None
        pieces.append(TimePiece(id="steps", predicted_s=predicted, measured_s=pace.steady_s * steps, count=steps))
        for one in pace.slower:
            expected = (
                timing.compile_s.expected_s if timing and timing.compile_s and one.cause == "compilation" else None
            )
            pieces.append(TimePiece(id=one.cause, predicted_s=expected, measured_s=one.lost_s, count=one.steps))
    pieces += [*([earlier] if earlier else []), *_asides(metrics, events, timing)]
    spent = sum(piece.measured_s or 0.0 for piece in pieces)
    if pieces and wall > spent:
        pieces.append(TimePiece(id="other", predicted_s=None, measured_s=wall - spent))
    elif pace is not None:  # most steps were a little faster than their median
        steps_s = pieces[0].measured_s or 0.0
        pieces[0] = pieces[0].model_copy(update={"measured_s": max(0.0, steps_s - (spent - wall))})
    if pace is not None and pace.data_wait_s is not None:
        count = pace.counted_steps
        pieces.append(
            TimePiece(id="data_in_steps", predicted_s=None, measured_s=pace.data_wait_s, count=count, inside=True)
        )
    return tuple(pieces)


def _earlier(metrics: list[dict[str, Any]], world_from: int) -> TimePiece | None:
    """Sum up the steps of another number of ranks; a line has the mean of those since the one before."""
    spent, before = 0.0, -1
    for line in step_lines(metrics):
        if line["step"] < world_from:
            spent, before = spent + line["step_s"] * max(1, line["step"] - before), line["step"]
    return TimePiece(id="other_ranks", predicted_s=None, measured_s=spent, count=before + 1) if spent else None


def _notes(record: TrainedRun, metrics: list[dict[str, Any]]) -> tuple[Note, ...]:
    found = measured(metrics, record.resumed_from, record.world_from)
    return (found.note,) if found and found.note else ()


def _step(plan: Plan, pace: RunPace | None, machine: MachineLoad | None) -> Row | None:
    if plan.foretrain_timing is None or pace is None or not pace.steady_s:
        return None
    step = plan.foretrain_timing.step_s
    low, high = step.low_s, step.high_s
    return Row(
        id="time.step", kind="seconds", predicted=step.expected_s, measured=pace.steady_s, low=low, high=high,
        busy=machine is not None and machine.busy,
    )  # fmt: skip


def failures_of(record: RunRecord, events: Lines) -> tuple[OutOfMemory, ...]:
    """Return every out-of-memory error; the last one ended the run where it is recorded so."""
    found = []
    for event in events:
        values = event.get("values")
        if event.get("id") == "out_of_memory" and isinstance(values, dict):
            found.append(failure_of(values))
    by_memory = record.source == "trainer" or record.reason.startswith("memory.")
    if found and record.status == "failed" and by_memory:
        found[-1] = found[-1].model_copy(update={"fatal": True})
    return tuple(found)


def failure_of(values: dict[str, Any]) -> OutOfMemory:
    def whole(key: str) -> int | None:
        value = values.get(key)
        return value if type(value) is int and value >= 0 else None

    names = [
        name for name in OutOfMemory.model_fields if name.endswith("_bytes") or name in ("batch_size", "accumulation")
    ]
    known = {name: whole(name) for name in names}
    free = known["free_bytes"]
    allowed, reserved = whole("allowed_bytes"), known["reserved_bytes"]
    if allowed is not None and reserved is not None and free is not None:
        known["free_bytes"] = free = min(free, max(0, allowed - reserved))
    asked = known["asked_bytes"]
    known["over_bytes"] = max(0, asked - free) if asked is not None and free is not None else None
    parts = (known["weights_bytes"], known["gradients_bytes"], known["optimizer_bytes"])
    rest = _less(known["allocated_bytes"], *parts)
    known["rest_bytes"] = max(0, rest) if rest is not None else None
    return OutOfMemory.model_validate(
        {
            "phase": str(values.get("phase") or "")[:40], "moment": str(values.get("moment") or "")[:40],
            "step": whole("step") or 0, "micro_step": whole("micro_step") or 0, "fatal": False, **known,
        }
    )  # fmt: skip


def _remedies(record: TrainedRun, failures: tuple[OutOfMemory, ...]) -> tuple[Advice, ...]:
    if record.status != "failed" or not record.reason.startswith("memory."):
        return ()
    last = failures[-1] if failures else None
    on_card = record.gpu.kind == "cuda"
    return remedies(
        record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype}), record.gpu,
        used_by_others_bytes=(last.used_by_others_bytes or 0) if last and on_card else 0,
        over_bytes=(last.over_bytes or 0) if last else 0,
    )  # fmt: skip


class TrainerRunExplanation(Record):
    """The answer for one run of a Trainer.

    `forecast`: from before the first step. `phases`: allocated bytes of each; `reserved`: by the allocator. `changes`:
    what would have prevented a fatal out-of-memory error.
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
    record = directory.record_of(TrainerRun)
    metrics, events = directory.read_lines("metrics", whole=False), directory.read_lines("events")
    return explain_trainer_run(record, forecast_in(directory.path), metrics, events)


def explain_trainer_run(
    record: TrainerRun,
    forecast: FineTunePlan | None,
    metrics: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
) -> TrainerRunExplanation:
    """Explain by a run's own records and its forecast; where longer sequences came than planned, with theirs."""
    first = forecast.tune.seq_len if forecast else None
    seq_len = record.seq_len or 0
    if forecast is not None and seq_len > forecast.tune.seq_len and forecast.memory.source != "traced":
        forecast = _with_seq_len(forecast, seq_len)
    failures = failures_of(record, events)
    timing = forecast.timing if forecast else None
    step = None
    if record.step_s:
        predicted = timing.step_s.expected_s if timing else None
        step = TimePiece(id="steps", predicted_s=predicted, measured_s=record.step_s, count=record.steps_done)
    return TrainerRunExplanation(
        record=record, forecast=forecast, forecast_seq_len=first, phases=_trainer_phases(record, forecast), step=step,
        reserved=_trainer_phases(record, forecast, reserved=True), time=_trainer_time(record, metrics, events),
        predicted_tokens_per_s=timing.tokens_per_s if timing else None, failures=failures,
        changes=changes(forecast) if forecast and failures and failures[-1].fatal else (),
    )  # fmt: skip


def _with_seq_len(forecast: FineTunePlan, seq_len: int) -> FineTunePlan:
    try:
        return replanned(forecast, seq_len=seq_len)
    except (UserError, ValueError):  # beyond the model's positions: the run's own business
        return forecast


def _trainer_phases(record: TrainerRun, forecast: FineTunePlan | None, *, reserved: bool = False) -> tuple[Piece, ...]:
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


def _trainer_time(
    record: TrainerRun, metrics: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> tuple[TimePiece, ...]:
    steps = _numbers((line for line in metrics if line["kind"] == "step"), "step_s")
    found = []
    if steps:
        middle = record.step_s or median(steps)
        usual = sum(min(one, middle) for one in steps)
        found.append(TimePiece(id="steps", predicted_s=None, measured_s=usual, count=len(steps)))
        found.append(TimePiece(id="slower", predicted_s=None, measured_s=sum(steps) - usual))
    found += _asides(metrics, events)
    rest = record.wall_s - sum(piece.measured_s or 0.0 for piece in found)
    if found and rest > 0:
        found.append(TimePiece(id="other", predicted_s=None, measured_s=rest))
    return tuple(found)
