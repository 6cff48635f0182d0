"""The report of a log, or of a watched run, as a Document: its explanation with pictures, and what its plan says."""

from foretrain.advice.remedies import Remedy
from foretrain.analysis.log_analysis import LogAnalysis
from foretrain.analysis.run import OutOfMemory
from foretrain.app.log_report import LogFacts
from foretrain.monitoring.record import WatchRecord
from foretrain.reports.document import Cell, Document, Figure, Figures, Message, Paragraph, Quantity, Section
from foretrain.reports.views import curves as curves_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views import run_explain as run_explain_view
from foretrain.reports.views.memory import phase_bars, verdicts


def document(
    found: LogAnalysis | None, record: WatchRecord | None, failures: tuple[OutOfMemory, ...],
    remedies: tuple[Remedy, ...], facts: LogFacts,
) -> Document:  # fmt: skip
    """The whole report."""
    plain = run_explain_view.of_log(found, record, failures, remedies)
    figures, said = _figures(found, record), _verdict(found, failures)
    blocks = (*said, *([figures] if figures.items else []))
    sections = [Section(Message("report.figures"), blocks)] if blocks else []
    if facts.losses is not None and facts.losses.curves:
        sections.append(Section(Message("report.learning"), curves_view.losses(facts.losses)))
    if facts.signs is not None and facts.signs.signs:
        sections.append(
            Section(Message("report.machine"), curves_view.signs(facts.signs, "" if record else "report.log_silent"))
        )
    sections += plain.sections
    if facts.plan is not None and facts.outlook is not None:
        memory = facts.plan.memory_of("nanogpt")
        sections.append(
            Section(Message("report.memory"), (phase_bars(facts.plan, memory), *verdicts(facts.plan, memory)))
        )
        sections += outlook_view.sections(facts.plan, facts.outlook)
    elif found is not None:
        sections.append(Section(Message("report.more"), (Paragraph(Message("report.give_config")),)))
    return Document(plain.title, plain.subtitle, sections)


def _verdict(found: LogAnalysis | None, failures: tuple[OutOfMemory, ...]) -> tuple[Paragraph, ...]:
    """What the log comes to, in a sentence."""
    said = [Paragraph(Message("report.log_died"), "bad")] if failures else []
    if found is None:
        return tuple(said)
    values = {"steps": found.steps, "last": found.last_step, "step": found.steady_s, "lost": found.lost_s}
    return (*said, Paragraph(Message("report.log_said", values)))


def _figures(found: LogAnalysis | None, record: WatchRecord | None) -> Figures:
    logged, measured = Message("report.source_log"), Message("axis.measured")
    items: list[tuple[str, Cell | None, Cell]] = []
    if found is not None:
        loss, used = found.losses, found.utilization
        items += [
            ("step", Quantity(found.steady_s, "duration"), logged),
            ("speed", f"{found.tokens_per_s:,.0f}" if found.tokens_per_s else None, logged),
            ("mfu", Quantity(used.mfu, "percent") if used and used.mfu else None, logged),
            ("loss", f"{loss.last_loss:.4f}" if loss.last_loss is not None else None, logged),
            ("val_loss", f"{loss.last_val_loss:.4f}" if loss.last_val_loss is not None else None, logged),
        ]
    if record is not None:
        cards = [card.ours_peak_bytes for card in record.cards if card.ours_peak_bytes]
        held = max(cards, default=record.rss_peak_bytes)
        joules = sum(card.energy_j or 0.0 for card in record.cards)
        items += [
            ("wall", Quantity(record.wall_s, "duration"), measured),
            ("memory", Quantity(held, "bytes") if held else None, measured),
            ("energy", Quantity(joules, "energy") if joules else None, measured),
        ]
    shown = (Figure(Message(f"figure.{id}"), value, source) for id, value, source in items if value is not None)
    return Figures(tuple(shown))
