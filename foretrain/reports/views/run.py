"""Runs in a list, a run's forecast beside what it measured, and what a report says of a run at its head and its end."""

from dataclasses import replace

from foretrain.analysis.forecast_check import ForecastCheck, Row
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Message,
    Paragraph,
    Quantity,
    Section,
    Table,
)
from foretrain.training.store import MachineLoad, RunDirectory, RunRecord

STATUS_TONES = {
    "finished": "good",
    "interrupted": "warn",
    "killed": "warn",
    "diverged": "bad",
    "failed": "bad",
}
_UNSAVED = {"interrupted": "status.interrupted_unsaved", "killed": "status.killed_unsaved"}


def status_text(directory: RunDirectory, record: RunRecord) -> Message:
    """How a run ended; one that saved nothing is not said to be resumable."""
    unsaved = None if directory.has_checkpoint else _UNSAVED.get(record.status)
    return Message(unsaved or f"status.{record.status}")


def runs_document(records: list[tuple[RunDirectory, RunRecord]]) -> Document:
    """`foretrain runs`: one row a run."""
    rows: list[tuple[Cell, ...]] = []
    tones = []
    for directory, record in records:
        rows.append(
            (
                str(directory.path),
                status_text(directory, record),
                f"{record.steps_done:,} / {record.config.max_iters:,}",
                f"{record.val_loss:.4f}" if record.val_loss is not None else "–",
                Message("value.throughput", {"tokens_per_s": record.tokens_per_s}) if record.tokens_per_s else "–",
                Quantity(record.mfu, "percent"),
                record.started_at.replace("T", " ")[:16],
            )
        )
        tones.append(STATUS_TONES.get(record.status, "plain"))
    names = ("run", "status", "steps", "val_loss", "speed", "mfu", "started")
    columns = tuple(Message(f"column.{name}") for name in names)
    table = Table(columns, tuple(rows), frozenset({2, 3, 4, 5}), tuple(tones))
    title = Message("runs.title", {"count": len(records)})
    return Document(title, Message("runs.subtitle"), [Section(Message("runs.section"), (table,))])


def comparison_document(comparison: ForecastCheck) -> Document:
    """`foretrain compare RUN`."""
    sections = comparison_sections(comparison)
    title = Message("compare.title", {"id": comparison.run_id})
    return Document(title, Message("compare.subtitle"), sections)


def comparison_sections(comparison: ForecastCheck) -> list[Section]:
    """Memory and time, each a table with signed errors."""
    sources = {"predicted": comparison.predicted_source, "measured": comparison.measured_source}
    notes = tuple(Paragraph(Message(f"run_note.{note.id}", note.values), "warn") for note in comparison.notes)
    parts = (
        ("compare.memory", comparison.memory, Message("compare.memory_source", sources), ()),
        ("compare.time", comparison.time, Message("compare.time_source", {"predicted": comparison.time_source}), notes),
    )
    sections = [
        Section(
            Message(title),
            (_rows(rows), Paragraph(source), *notes) if rows else (Paragraph(Message("compare.nothing")),),
        )
        for title, rows, source, notes in parts
    ]
    if load := load_paragraphs(comparison.machine):
        sections[-1] = replace(sections[-1], blocks=(*sections[-1].blocks, *load))
    return sections


def load_paragraphs(machine: MachineLoad | None) -> tuple[Paragraph, ...]:
    """What other programs used of the processor, where that is why a run was slow."""
    if machine is None or not machine.busy:
        return ()
    found = [Message("compare.machine_busy", {"others": machine.others_share, "own": machine.own_share})]
    if machine.stalls:
        found.append(Message("compare.machine_stalled", {"stalls": machine.stalls, "lost": machine.stalled_s}))
    return tuple(Paragraph(message, "warn") for message in found)


def _rows(rows: tuple[Row, ...]) -> Table:
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        unit = "bytes" if row.kind == "bytes" else "duration"
        spread: Cell = ""
        if row.low is not None and row.high is not None:
            values = {"low": row.low, "high": row.high}
            spread = (
                Quantity((row.low, row.high), "bytes_range") if unit == "bytes" else Message("value.range_only", values)
            )
        inside: Cell = "" if row.in_range is None else Message("word.inside" if row.in_range else "word.outside")
        inside = Message("word.busy") if row.busy else inside
        cells.append(
            (
                Message(f"quantity.{row.id}"),
                Quantity(row.predicted, unit),
                spread,
                Quantity(row.measured, unit),
                Quantity(row.error, "signed_percent"),
                inside,
            )
        )
    columns = tuple(
        Message(f"column.{name}") for name in ("quantity", "predicted", "range", "measured", "error", "in_range")
    )
    return Table(columns, tuple(cells), frozenset({1, 2, 3, 4}))


def subtitle(record: RunRecord) -> Message:
    """What was trained, on what, when."""
    values = {
        "params": record.n_params, "gpu": record.gpu.name, "dtype": record.dtype,
        "mode": Message("mode.compiled" if record.compiled else "mode.eager"), "started": record.started_at[:10],
    }  # fmt: skip
    return Message("report.subtitle", values)


def summary(record: RunRecord, unigram: float | None) -> tuple[Block, ...]:
    """How it ended, what it learned, how fast it was."""
    values = {
        "status": Message(f"status.{record.status}"), "steps": record.steps_done, "of": record.config.max_iters,
        "tokens": record.steps_done * record.config.tokens_per_step, "wall": record.wall_s,
    }  # fmt: skip
    blocks: list[Block] = [Paragraph(Message("report.ran", values), STATUS_TONES.get(record.status, "plain"))]
    if record.first_val_loss is not None and record.val_loss is not None:
        losses = {"first": record.first_val_loss, "last": record.val_loss, "unigram": unigram}
        blocks.append(Paragraph(Message("report.loss_unigram" if unigram else "report.loss", losses)))
    if record.tokens_per_s:
        speed = {"tokens_per_s": record.tokens_per_s, "mfu": record.mfu, "gpu": record.gpu.name}
        blocks.append(Paragraph(Message("report.speed" if record.mfu else "report.speed_only", speed)))
    return tuple(blocks)


def changed_knobs(record: RunRecord) -> Table:
    """The settings that are not the defaults."""
    default = type(record.config)()
    rows = tuple(
        (name, str(value), str(getattr(default, name)))
        for name, value in record.config
        if value != getattr(default, name)
    )
    columns = (Message("column.key"), Message("column.value"), Message("column.default"))
    return Table(columns, rows)
