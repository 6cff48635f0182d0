"""A log, or a run that `foretrain watch` measured, as a Document: for a terminal and, with curves, for a page."""

from foretrain.app.explain import LogExplanation
from foretrain.app.logs.report import LogFacts
from foretrain.reports.document import Block, Cell, Document, Figures, Message, Only, Paragraph, Quantity, Section
from foretrain.reports.views import curves as curves_view
from foretrain.reports.views import figures, log_analysis
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views import watch as watch_view
from foretrain.reports.views.finetune.run import change_blocks
from foretrain.reports.views.memory import phase_bars, verdicts
from foretrain.reports.views.run_explain import out_of_memory, remedy_blocks


def document(explained: LogExplanation, facts: LogFacts | None = None) -> Document:
    """How memory ran out, what `foretrain watch` measured around the log, the log itself. `facts`: curves and, with a
    config and a card, what its plan says."""
    log, record = explained.log, explained.watched
    sections = [_first(explained), *(_curves(facts, watched=record is not None) if facts else [])]
    sections += _ran_out(explained)
    sections += watch_view.machine_sections(record) if record is not None else []
    sections += log_analysis.sections(log) if log is not None else []
    sections += _surroundings(facts, read=log is not None) if facts else []
    if record is not None:
        title = Message("watch.title", {"command": watch_view.command_text(record)})
        return Document(title, watch_view.subtitle(record), sections)
    titles = log_analysis.titles(log) if log else (Message("oom.log_title"), Message("oom.log_subtitle"))
    return Document(*titles, sections)


def _first(explained: LogExplanation) -> Section:
    """What a page says first; a terminal has the same, told at length, beneath."""
    row = _figures(explained)
    blocks = (*_verdict(explained), *([row] if row.items else []))
    return Section(Message("report.figures"), tuple(Only("page", block) for block in blocks))


def _curves(facts: LogFacts, *, watched: bool) -> list[Section]:
    sections = []
    if facts.losses is not None and facts.losses.curves:
        sections.append(Section(Message("report.learning"), curves_view.losses(facts.losses)))
    if facts.signs is not None and facts.signs.signs:
        signs = curves_view.signs(facts.signs, "" if watched else "report.log_silent")
        sections.append(Section(Message("report.machine"), signs))
    return sections


def _ran_out(explained: LogExplanation) -> list[Section]:
    """How memory ran out. A log that cannot be the config's run gets no advice, and that is said first."""
    if not explained.out_of_memory:
        return []
    doubts = tuple(Paragraph(Message(f"oom_doubt.{doubt.id}", doubt.values), "bad") for doubt in explained.doubts)
    saved: tuple[Block, ...] = ()
    if explained.unknown:
        saved = (Paragraph(Message(f"oom.{explained.unknown}")),)
    elif explained.changes is not None:
        saved = change_blocks(explained.changes)
    elif not doubts:
        saved = remedy_blocks(explained.remedies, "oom.same_tokens")
    sections = out_of_memory(explained.out_of_memory, saved, "callback.fragmented")
    return [Section(Message("oom.other_run"), doubts), *sections] if doubts else sections


def _surroundings(facts: LogFacts, *, read: bool) -> list[Section]:
    """What the plan of the log's config says, or that a config would tell more."""
    if facts.plan is not None and facts.outlook is not None:
        memory = facts.plan.memory_of("nanogpt")
        blocks = (phase_bars(facts.plan, memory), *verdicts(facts.plan, memory))
        return [Section(Message("report.memory"), blocks), *outlook_view.sections(facts.plan, facts.outlook)]
    return [Section(Message("report.more"), (Paragraph(Message("report.give_config")),))] if read else []


def _verdict(explained: LogExplanation) -> tuple[Paragraph, ...]:
    found = explained.log
    said = [Paragraph(Message("report.log_died"), "bad")] if explained.out_of_memory else []
    if found is None:
        return tuple(said)
    values = {"steps": found.steps, "last": found.last_step, "step": found.steady_s, "lost": found.lost_s}
    id = "report.log_said_no_times" if found.steady_s is None else "report.log_said"
    return (*said, Paragraph(Message(id, values)))


def _figures(explained: LogExplanation) -> Figures:
    found, record = explained.log, explained.watched
    logged, measured = Message("report.source_log"), Message("axis.measured")
    items: list[tuple[str, Cell | None, Cell]] = []
    if found is not None:
        loss, used = found.losses, found.utilization
        items += [
            ("step", Quantity(found.steady_s, "duration") if found.steady_s else None, logged),
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
    return figures.row(items)
