"""A Trainer's run with ForetrainCallback: its forecast before the first step, and both beside each other afterwards."""

from foretrain.advice.asked import Asked
from foretrain.advice.record import Advice
from foretrain.analysis.run import OutOfMemory, TimePiece, TrainerRunExplanation
from foretrain.comparison.loss_axes import LossCurves
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import PhaseMemory
from foretrain.reports.document import Block, Cell, Document, Message, Only, Paragraph, Quantity, Section, Table
from foretrain.reports.views.advice import change_text
from foretrain.reports.views.curves import losses
from foretrain.reports.views.lead import lead_of, title
from foretrain.reports.views.run_explain import error_cell, out_of_memory, pieces_table
from foretrain.runs.record import TrainerRun

Rows = list[tuple[Cell, ...]]
MOST_CHANGES = 3
SHOWN_NOTES = ("finetune_unplanned", "callback_not_traced")  # notes that matter in a script


def before(plan: FineTunePlan | None, problem: str, cards: int) -> Document:
    paragraphs: list[Block] = []
    if plan is None:
        paragraphs.append(Paragraph(Message("callback.no_forecast", {"reason": problem}), "warn"))
        return Document(
            Message("callback.title"),
            Message("callback.measures"),
            [Section(Message("callback.forecast"), tuple(paragraphs))],
        )
    on_card = plan.gpu.kind == "cuda"
    if on_card:
        paragraphs += lead_of(plan)
    rows = tuple(_phase(phase, on_card=on_card) for phase in plan.memory.phases)
    names = ("phase", "allocated", *(("reserved",) if on_card else ()))
    paragraphs.append(Table(tuple(Message(f"column.{name}") for name in names), rows, frozenset({1, 2})))
    paragraphs.append(Paragraph(_speed(plan)))
    tune = plan.tune
    values = {"batch": tune.sequences, "seq_len": tune.seq_len, "accum": tune.grad_accum, "source": plan.memory.source}
    paragraphs.append(Paragraph(Message("callback.assumes", values)))
    if cards > 1:
        paragraphs.append(Paragraph(Message("callback.cards", {"cards": cards})))
    left_out = [note for note in plan.notes if note.id in SHOWN_NOTES]
    paragraphs += [Paragraph(Message(f"note.{note.id}", note.values), "warn") for note in left_out]
    return _before(title(plan, Asked()), paragraphs)


def _phase(phase: PhaseMemory, *, on_card: bool) -> tuple[Cell, ...]:
    reserved = (Quantity(phase.reserved_bytes, "bytes"),) if on_card else ()
    return Message(f"phase.{phase.phase}"), Quantity(phase.allocated_bytes, "bytes"), *reserved


def _before(heading: Message, paragraphs: list[Block]) -> Document:
    return Document(heading, Message("callback.measures"), [Section(Message("callback.forecast"), tuple(paragraphs))])


def _speed(plan: FineTunePlan) -> Message:
    timing = plan.timing
    if timing is None:
        return Message("callback.no_time", {"gpu": plan.gpu.name})
    total = timing.total_s
    values = {
        "step": timing.step_s.expected_s, "tokens": timing.tokens_per_s, "steps": timing.steps or 0,
        "total": (total.low_s, total.expected_s, total.high_s) if total else (0.0, 0.0, 0.0),
    }  # fmt: skip
    return Message("callback.time" if total else "callback.speed", values)


def document(found: TrainerRunExplanation, curves: LossCurves | None = None) -> Document:
    record = found.record
    sections = _out_of_memory(found)
    sections.append(Section(Message("callback.memory"), _memory(found)))
    sections.append(Section(Message("callback.speed_title"), _step(found)))
    if found.time:
        sections.append(Section(Message("run_explain.time"), (_time(found),)))
    if curves is not None and curves.curves:
        sections.append(Section(Message("log.losses"), losses(curves)))
    elif record.last_loss is not None:
        sections.append(Section(Message("log.losses"), (_losses(record),)))
    return Document(Message("callback.run_title", {"name": record.name}), subtitle(record), sections)


def subtitle(record: TrainerRun) -> Message:
    """How it ended, how many steps it did, on what."""
    values = {
        "status": Message(f"callback.status.{record.status}"),
        "steps": record.steps_done, "trainer": record.trainer, "device": record.device, "wall": record.wall_s,
    }  # fmt: skip
    return Message("callback.run_subtitle", values)


def _out_of_memory(found: TrainerRunExplanation) -> list[Section]:
    if not found.failures:
        paragraphs = (Paragraph(Message("callback.failed", {"reason": found.record.reason}), "bad"),)
        return [Section(Message("callback.ended"), paragraphs)] if found.record.status == "failed" else []
    sections = out_of_memory(found.failures, (), "callback.fragmented")
    last = found.failures[-1]
    blocks = tuple(block for block in sections[0].blocks if not isinstance(block, Only))
    sections[0] = Section(sections[0].title, (*blocks, *_against_forecast(found, last)))
    if last.fatal:
        sections.append(Section(Message("oom.saved"), change_blocks(found.changes)))
    return sections


def ran_out(found: TrainerRunExplanation) -> Document:
    sections = [*_out_of_memory(found), Section(Message("callback.memory"), _memory(found))]
    return Document(Message("callback.run_title", {"name": found.record.name}), subtitle(found.record), sections)


def _against_forecast(found: TrainerRunExplanation, last: OutOfMemory) -> tuple[Block, ...]:
    plan = found.forecast
    if plan is None:
        return ()
    names = [phase.phase for phase in plan.memory.phases]
    phase = plan.memory.phase(last.phase) if last.phase in names else plan.memory.neediest
    values = {
        "phase": Message(f"phase.{phase.phase}"), "needed": phase.needed_expected_bytes,
        "available": plan.available_bytes or 0, "verdict": Message(f"word.{plan.verdict}") if plan.verdict else "–",
    }  # fmt: skip
    paragraphs = Paragraph(Message("callback.forecast_said", values))
    return (paragraphs, Paragraph(Message("callback.too_low"), "warn")) if plan.verdict == "fits" else (paragraphs,)


def change_blocks(changes: tuple[Advice, ...]) -> tuple[Block, ...]:
    if not changes:
        return (Paragraph(Message("callback.no_changes")),)
    rows = tuple((f"{i}.", change_text(None, change)) for i, change in enumerate(changes[:MOST_CHANGES], 1))
    return Table((), rows), Paragraph(Message("callback.changes_are"))


def _memory(found: TrainerRunExplanation) -> tuple[Block, ...]:
    record, plan = found.record, found.forecast
    if not found.phases:
        return (Paragraph(Message("callback.not_measured")),)
    values = {"measured": record.memory.method, "predicted": plan.memory.source if plan else "–"}
    blocks: list[Block] = [Paragraph(Message("callback.memory_of" if plan else "callback.memory_alone", values))]
    if plan is None and record.forecast_problem:
        blocks.insert(0, Paragraph(Message("callback.no_forecast", {"reason": record.forecast_problem}), "warn"))
    blocks.append(pieces_table(found.phases, "phase", Message("callback.allocated")))
    if found.reserved:
        blocks.append(pieces_table(found.reserved, "phase", Message("callback.reserved")))
    if plan is not None and found.forecast_seq_len and found.forecast_seq_len < plan.tune.seq_len:
        longer = {"first": found.forecast_seq_len, "longest": plan.tune.seq_len}
        blocks.append(Paragraph(Message("callback.longer", longer)))
    if record.cards > 1:
        blocks.append(Paragraph(Message("callback.cards", {"cards": record.cards})))
    return tuple(blocks)


def _step(found: TrainerRunExplanation) -> tuple[Block, ...]:
    record, step = found.record, found.step
    if step is None:
        return (Paragraph(Message("callback.no_steps")),)
    columns = (Message("column.component"), *(Message(f"column.{name}") for name in ("predicted", "measured", "error")))
    predicted, tokens = found.predicted_tokens_per_s, record.tokens_per_s
    seconds = Quantity(step.predicted_s, "duration"), Quantity(step.measured_s, "duration")
    rows: Rows = [(Message("callback.step"), *seconds, error_cell(step.predicted_s, step.measured_s))]
    if record.first_step_s:
        rows.append((Message("callback.first_step"), "–", Quantity(record.first_step_s, "duration"), "–"))
    if tokens:
        rows.append(
            (
                Message("callback.tokens"),
                Quantity(predicted, "count"),
                Quantity(tokens, "count"),
                error_cell(predicted, tokens),
            )
        )
    return (Table(columns, tuple(rows), frozenset({1, 2, 3})),)


def _time(found: TrainerRunExplanation) -> Table:
    wall_s = found.record.wall_s
    names = ("column.component", "column.count", "column.measured", "snapshot.share")
    rows: Rows = [_time_row(piece, wall_s) for piece in found.time]
    rows.append((Message("time_piece.wall"), "", Quantity(wall_s, "duration"), Quantity(1.0, "percent")))
    return Table(tuple(Message(name) for name in names), tuple(rows), frozenset({1, 2, 3}))


def _time_row(piece: TimePiece, wall_s: float) -> tuple[Cell, ...]:
    measured_s = piece.measured_s or 0.0
    share = Quantity(measured_s / wall_s if wall_s else None, "percent")
    name = Message("callback.slower" if piece.id == "slower" else f"time_piece.{piece.id}")
    return name, f"{piece.count:,}" if piece.count else "", Quantity(measured_s, "duration"), share


def _losses(record: TrainerRun) -> Table:
    rows: Rows = [(Message("callback.training_loss"), f"{record.first_loss:.4f} → {record.last_loss:.4f}")]
    if record.val_loss is not None:
        rows.append((Message("callback.val_loss"), f"{record.val_loss:.4f}"))
    return Table((), tuple(rows))
