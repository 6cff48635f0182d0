"""A run's forecast beside what it measured, and the report of a run, as Documents."""

from dataclasses import replace

from foretrain.analysis.forecast_check import ForecastCheck, Row
from foretrain.app.run_report import RunFacts
from foretrain.predict.timing import JOULES_PER_KWH
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Figures,
    Level,
    Message,
    Paragraph,
    Quantity,
    Section,
    Table,
    Verbatim,
)
from foretrain.reports.views import agreement as agreement_view
from foretrain.reports.views import curves as curves_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views import run_explain
from foretrain.reports.views import run_explain as ranks_view
from foretrain.reports.views.memory import phase_bars
from foretrain.reports.views.runs import STATUS_TONES
from foretrain.reports.views.takes import figures_of
from foretrain.runs.record import TrainedRun

LEAST_MONEY = 0.005  # less is not worth a figure
Evaluations = tuple[tuple[int, float, float, float | None], ...]


def comparison_document(comparison: ForecastCheck) -> Document:
    ranks = ranks_view.sections(comparison.ranks, comparison.predicted_source)
    sections = [*ranks, *comparison_sections(comparison)]
    title = Message("compare.title", {"id": comparison.run_id})
    return Document(title, Message("compare.subtitle"), sections)


def comparison_sections(comparison: ForecastCheck) -> list[Section]:
    sources = {"predicted": comparison.predicted_source, "measured": comparison.measured_source}
    notes = tuple(Paragraph(Message(f"run_note.{note.id}", note.values), "warn") for note in comparison.notes)
    several = comparison.ranks is not None and comparison.ranks.world > 1
    of_first = (Paragraph(Message("ranks.first_and_most")),) if several else ()
    parts = (
        ("compare.memory", comparison.memory, Message("compare.memory_source", sources), of_first),
        ("compare.time", comparison.time, Message("compare.time_source", {"predicted": comparison.time_source}), notes),
    )
    sections = [
        Section(
            Message(title),
            (_rows(rows), Paragraph(source), *notes) if rows else (Paragraph(Message(_nothing(comparison))),),
        )
        for title, rows, source, notes in parts
    ]
    if load := run_explain.load_paragraphs(comparison.machine):
        sections[-1] = replace(sections[-1], blocks=(*sections[-1].blocks, *load))
    return sections


def _nothing(comparison: ForecastCheck) -> str:
    on_cpu = comparison.ranks is not None and comparison.ranks.world > comparison.ranks.devices
    return "ranks.no_predicted_speed" if on_cpu and comparison.memory else "compare.nothing"


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


def subtitle(record: TrainedRun) -> Message:
    values = {
        "params": record.n_params, "gpu": record.gpu.name, "dtype": record.dtype,
        "mode": Message("mode.compiled" if record.compiled else "mode.eager"), "started": record.started_at[:10],
    }  # fmt: skip
    return Message("report.subtitle", values)


def summary(record: TrainedRun, unigram: float | None) -> tuple[Block, ...]:
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


def changed_options(record: TrainedRun) -> Table:
    default = type(record.config)()
    rows = tuple(
        (name, str(value), str(getattr(default, name)))
        for name, value in record.config
        if value != getattr(default, name)
    )
    columns = (Message("column.key"), Message("column.value"), Message("column.default"))
    return Table(columns, rows)


# -- the report of a run ----------------------------------------------------------------------------------


def report(facts: RunFacts) -> Document:
    record = facts.record
    sections = [Section(Message("report.summary"), (*_forecasts(facts), *_verdict(facts), _figures(facts)))]
    sections += run_explain.endings(facts.explanation)
    sections += run_explain.rank_sections(facts.explanation)
    sections.append(Section(Message("report.learning"), _learning(facts)))
    sections.append(Section(Message("report.machine"), curves_view.signs(facts.signs)))
    memory, time = comparison_sections(facts.check)
    bars = phase_bars(facts.plan, facts.plan.memory_of("foretrain"), record.memory)
    sections.append(Section(Message("report.memory"), (bars, *memory.blocks)))
    scatter = agreement_view.pictures([(record.name, facts.check.rows)], facts.check.sources)
    sections.append(Section(Message("report.check"), (*scatter, *time.blocks)))
    sections += run_explain.time_sections(facts.explanation)
    sections += run_explain.score_sections(facts.explanation)
    sections += outlook_view.sections(facts.plan, facts.outlook)
    if facts.sample:
        sections.append(Section(Message("report.sample"), (Verbatim(facts.sample),)))
    sections.append(Section(Message("report.config"), (changed_options(record),)))
    name = facts.label.title or record.name
    name = name if name == facts.folder else f"{name} ({facts.folder})"
    return Document(Message("report.title", {"name": name}), subtitle(record), sections)


# The rows that a forecast is judged by in a sentence; the first that there is.
_FORECASTS = {"memory_said": ("process.reserved", "process.resident", "phase.steady_step"), "time_said": ("time.step",)}


def _forecasts(facts: RunFacts) -> tuple[Block, ...]:
    note, tags = facts.label.note, facts.label.tags
    found = [Paragraph(Message("report.note", {"note": note}))] if note else []
    return (*found, *([Paragraph(Message("report.tags", {"tags": list(tags)}))] if tags else []))


def _verdict(facts: RunFacts) -> tuple[Block, ...]:
    blocks = list(summary(facts.record, facts.unigram))
    rows = {row.id: row for row in facts.check.rows}
    forecasts: list[Block] = []
    for id, names in _FORECASTS.items():
        row = next((rows[name] for name in names if name in rows), None)
        if row is not None:
            values = {"predicted": row.predicted, "measured": row.measured, "error": row.error}
            inside = "plain" if row.in_range is None else "inside" if row.in_range else "outside"
            if row.busy and (machine := facts.check.machine) is not None:
                inside, values["others"] = "busy", machine.others_share
            forecasts.append(Paragraph(Message(f"{id}.{inside}", values), "warn" if inside == "outside" else "plain"))
    return (*blocks[:1], *forecasts, *blocks[1:])


def _figures(facts: RunFacts) -> Figures:
    record, measured = facts.record, Message("axis.measured")
    found: list[tuple[str, Cell | None, Cell]] = [
        ("steps", f"{record.steps_done:,} / {record.config.max_iters:,}", measured),
        ("val_loss", f"{record.val_loss:.4f}" if record.val_loss is not None else None, measured),
        ("wall", Quantity(record.wall_s, "duration") if record.wall_s else None, measured),
        ("step", Quantity(record.step_s, "duration") if record.step_s else None, measured),
        ("speed", f"{record.tokens_per_s:,.0f}" if record.tokens_per_s else None, measured),
        ("mfu", Quantity(record.mfu, "percent") if record.mfu else None, measured),
        ("ranks", f"{record.world:,}" if record.world > 1 else None, measured),
        ("memory", Quantity(record.highest_bytes, "bytes") if record.highest_bytes else None, measured),
        ("data_wait", Quantity(record.data_wait_s, "duration") if record.data_wait_s else None, measured),
        *_spent(facts),
    ]  # fmt: skip
    return figures_of(found)


def _spent(facts: RunFacts) -> list[tuple[str, Cell | None, Cell]]:
    last = {
        name: max(curve.axes[name][-1] for curve in facts.losses.curves)
        for name in ("kwh", "cost")
        if name in facts.losses.axes
    }
    source = Message(f"energy_source.{facts.losses.energy_source}")
    kwh = facts.energy_j / JOULES_PER_KWH if facts.energy_j else last.get("kwh")
    cost = last.get("cost", 0.0)
    money = Message("value.amount", {"amount": cost, "currency": facts.losses.currency})
    return [
        ("energy", Quantity(kwh * JOULES_PER_KWH, "energy") if kwh else None, source),
        ("cost", money if cost >= LEAST_MONEY else None, source),
    ]


def _learning(facts: RunFacts) -> tuple[Block, ...]:
    levels = (Level(Message("axis.unigram"), facts.unigram),) if facts.unigram else ()
    pictures = curves_view.losses(facts.losses, levels=levels)
    rows = tuple(
        (f"{step:,}", f"{train:.4f}", f"{val:.4f}", Quantity(took, "duration"))
        for step, train, val, took in _every(facts.evaluations)
    )
    columns = tuple(Message(f"column.{name}") for name in ("step", "train_loss", "val_loss", "took"))
    if not rows and not pictures:
        return (Paragraph(Message("report.no_losses")),)
    return *pictures, *([Table(columns, rows, frozenset({0, 1, 2, 3}))] if rows else [])


def _every(found: Evaluations) -> Evaluations:
    stride = max(1, -(-len(found) // 24))
    return found[(len(found) - 1) % stride :: stride] if found else ()
