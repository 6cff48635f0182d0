"""The report of a run as a Document: how it ended and went against its forecast, then everything with pictures."""

from foretrain.app.run_report import RunFacts
from foretrain.predict.energy import JOULES_PER_KWH
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Figure,
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
from foretrain.reports.views import run as run_view
from foretrain.reports.views import run_explain as run_explain_view
from foretrain.reports.views.memory import phase_bars

MEASURED = "axis.measured"
LEAST_MONEY = 0.005  # less is not worth a figure
Evaluations = tuple[tuple[int, float, float, float | None], ...]


def document(facts: RunFacts) -> Document:
    """The whole report."""
    record = facts.record
    sections = [Section(Message("report.summary"), (*_verdict(facts), _figures(facts)))]
    explanation = run_explain_view.document(facts.explanation)
    sections += [s for s in explanation.sections if s.title.id.startswith("oom.") or s.title.id == "run_explain.killed"]
    sections.append(Section(Message("report.learning"), _learning(facts)))
    sections.append(Section(Message("report.machine"), curves_view.signs(facts.signs)))
    memory, time = run_view.comparison_sections(facts.check)
    bars = phase_bars(facts.plan, facts.plan.memory_of("foretrain"), record.memory)
    sections.append(Section(Message("report.memory"), (bars, *memory.blocks)))
    scatter = agreement_view.pictures([(record.name, facts.check.rows)], facts.check.sources)
    slower = [s for s in explanation.sections if s.title.id in ("run_explain.time", "run_explain.slower")]
    sections.append(Section(Message("report.check"), (*scatter, *time.blocks)))
    sections += slower
    sections += outlook_view.sections(facts.plan, facts.outlook)
    if facts.sample:
        sections.append(Section(Message("report.sample"), (Verbatim(facts.sample),)))
    sections.append(Section(Message("report.config"), (run_view.changed_knobs(record),)))
    name = record.name if record.name == facts.folder else f"{record.name} ({facts.folder})"
    return Document(Message("report.title", {"name": name}), run_view.subtitle(record), sections)


def _verdict(facts: RunFacts) -> tuple[Block, ...]:
    """How it ended, how far the forecast was off, what it learned."""
    blocks = list(run_view.summary(facts.record, facts.unigram))
    rows = {row.id: row for row in facts.check.rows}
    said: list[Block] = []
    for id, names in (
        ("memory_said", ("process.reserved", "process.resident", "phase.steady_step")),
        ("time_said", ("time.step",)),
    ):  # fmt: skip
        row = next((rows[name] for name in names if name in rows), None)
        if row is not None:
            values = {"predicted": row.predicted, "measured": row.measured, "error": row.error}
            inside = "plain" if row.in_range is None else "inside" if row.in_range else "outside"
            if row.busy and (machine := facts.check.machine) is not None:
                inside, values["others"] = "busy", machine.others_share
            said.append(Paragraph(Message(f"{id}.{inside}", values), "warn" if inside == "outside" else "plain"))
    return (*blocks[:1], *said, *blocks[1:])


def _figures(facts: RunFacts) -> Figures:
    record, measured = facts.record, Message(MEASURED)
    found: list[tuple[str, Cell | None, Cell]] = [
        ("steps", f"{record.steps_done:,} / {record.config.max_iters:,}", measured),
        ("val_loss", f"{record.val_loss:.4f}" if record.val_loss is not None else None, measured),
        ("wall", Quantity(record.wall_s, "duration") if record.wall_s else None, measured),
        ("step", Quantity(record.step_s, "duration") if record.step_s else None, measured),
        ("speed", f"{record.tokens_per_s:,.0f}" if record.tokens_per_s else None, measured),
        ("mfu", Quantity(record.mfu, "percent") if record.mfu else None, measured),
        ("memory", Quantity(record.highest_bytes, "bytes") if record.highest_bytes else None, measured),
        ("data_wait", Quantity(record.data_wait_s, "duration") if record.data_wait_s else None, measured),
        *_spent(facts),
    ]  # fmt: skip
    return Figures(tuple(Figure(Message(f"figure.{id}"), value, source) for id, value, source in found if value))


def _spent(facts: RunFacts) -> list[tuple[str, Cell | None, Cell]]:
    """Energy and money: by the card's own readings where there are some, else by the last point of the curves."""
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
    """Two dozen at most, evenly, the last one among them."""
    stride = max(1, -(-len(found) // 24))
    return found[(len(found) - 1) % stride :: stride] if found else ()
