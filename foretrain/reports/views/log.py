"""A log, or a watched run, as a Document: terminal and page; and a card's utilization."""

from foretrain.advice.remedies import Remedy
from foretrain.analysis.log_analysis import LogAnalysis
from foretrain.analysis.run import OutOfMemory
from foretrain.analysis.utilization import Utilization
from foretrain.app.explain import LogExplanation
from foretrain.app.log_report import LogFacts
from foretrain.base.messages import listed
from foretrain.base.units import rounds_to_zero
from foretrain.hardware.catalogue import catalogue
from foretrain.monitoring.log_formats import FORMATS
from foretrain.monitoring.record import WatchRecord
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Figures,
    Message,
    Only,
    Paragraph,
    Quantity,
    Section,
    Table,
)
from foretrain.reports.views import curves as curves_view
from foretrain.reports.views import figures
from foretrain.reports.views import out_of_memory as oom_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views import watch as watch_view
from foretrain.reports.views.compare import loss_unit
from foretrain.reports.views.memory import phase_bars, verdicts

Rows = list[tuple[Cell, ...]]


def document(explained: LogExplanation, facts: LogFacts | None = None) -> Document:
    """How memory ran out, what `foretrain watch` measured around the log, the log itself. `facts`: curves and, with a
    config and a card, what its plan says."""
    log, record, failures = explained.log, explained.watched, explained.out_of_memory
    sections = [_first(explained), *(_curves(facts, watched=record is not None) if facts else [])]
    sections += _ran_out(failures, explained.remedies) if failures else []
    sections += watch_view.machine_sections(record) if record is not None else []
    sections += _sections(log) if log is not None else []
    sections += _surroundings(facts, log) if facts else []
    title, subtitle = _titles(log, record)
    return Document(title, subtitle, sections)


def _titles(log: LogAnalysis | None, record: WatchRecord | None) -> tuple[Message, Message]:
    if record is not None:
        return Message("watch.title", {"command": watch_view.command_text(record)}), watch_view.subtitle(record)
    if log is None:
        return Message("oom.log_title"), Message("oom.log_subtitle")
    values = {"format": FORMATS[log.format].title or log.format, "steps": log.steps, "first": log.first_step}
    subtitle = Message("log.subtitle", {**values, "last": log.last_step, "interval": log.log_interval})
    return Message("log.title", {"name": log.name}), subtitle


def _first(explained: LogExplanation) -> Section:
    """What a page says first; a terminal has the same, told at length, beneath."""
    row = _figures(explained.log, explained.watched)
    blocks = (*_verdict(explained.log, explained.out_of_memory), *([row] if row.items else []))
    return Section(Message("report.figures"), tuple(Only("page", block) for block in blocks))


def _curves(facts: LogFacts, *, watched: bool) -> list[Section]:
    sections = []
    if facts.losses is not None and facts.losses.curves:
        sections.append(Section(Message("report.learning"), curves_view.losses(facts.losses)))
    if facts.signs is not None and facts.signs.signs:
        signs = curves_view.signs(facts.signs, "" if watched else "report.log_silent")
        sections.append(Section(Message("report.machine"), signs))
    return sections


def _ran_out(failures: tuple[OutOfMemory, ...], remedies: tuple[Remedy, ...]) -> list[Section]:
    sections = oom_view.sections(failures, remedies, exact="oom.same_tokens")
    if not remedies:  # without a config and a card nothing was looked for
        sections[-1] = Section(Message("oom.saved"), (Paragraph(Message("oom.give_config")),))
    return sections


def _surroundings(facts: LogFacts, log: LogAnalysis | None) -> list[Section]:
    """What the plan of the log's config says, or that a config would tell more."""
    if facts.plan is not None and facts.outlook is not None:
        memory = facts.plan.memory_of("nanogpt")
        blocks = (phase_bars(facts.plan, memory), *verdicts(facts.plan, memory))
        return [Section(Message("report.memory"), blocks), *outlook_view.sections(facts.plan, facts.outlook)]
    if log is None:
        return []
    return [Section(Message("report.more"), (Paragraph(Message("report.give_config")),))]


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
    return figures.row(items)


# -- the log itself ------------------------------------------------------------------------------------------


def _sections(found: LogAnalysis) -> list[Section]:
    sections = [Section(Message("log.speed"), _speed(found))]
    if found.findings:
        doubtful = any(f.tone == "bad" for f in found.findings)  # such a thing is said first
        blocks = tuple(
            Paragraph(Message(f"log_finding.{f.id}", f.values | _named(f.values)), f.tone) for f in found.findings
        )
        sections.insert(0 if doubtful else 1, Section(Message("log.findings"), blocks))
    sections.append(Section(Message("log.longer"), _longer(found)))
    sections.append(Section(Message("log.losses"), (_losses(found),)))
    if found.remaining:
        sections.append(Section(Message("log.remaining"), (_remaining(found),)))
    missing = _missing(found)
    if missing:
        sections.append(Section(Message("log.missing"), missing))
    return sections


def _named(values: dict[str, object]) -> dict[str, object]:
    """A list of what agrees, in words."""
    what = values.get("what")
    return {"what": listed(Message(f"log_what.{id}").text() for id in what)} if isinstance(what, list) else {}


def _speed(found: LogAnalysis) -> tuple[Block, ...]:
    step = {"median": found.steady_s, "low": found.steady_low_s, "high": found.steady_high_s}
    id = "value.steady_step" if found.steady_steps >= 10 else "value.steady_few"
    rows: Rows = [(Message("row.steady_step"), Message(id, {**step, "count": found.steady_steps}))]
    if found.tokens_per_s:
        source = Message(f"tokens_from.{found.tokens_source}")
        values = {"tokens_per_s": found.tokens_per_s, "tokens": found.tokens_per_step, "source": source}
        rows.append((Message("row.throughput"), Message("value.logged_throughput", values)))
    if found.utilization:
        rows += _shares(found.utilization)
    if found.logged_mfu is not None:
        rows.append((Message("row.logged_mfu"), Message("value.logged_mfu", {"mfu": found.logged_mfu})))
    if found.nanochat_mfu is not None:
        values = {"mfu": found.nanochat_mfu, "gpu": found.gpu_name}
        rows.append((Message("row.mfu"), Message("value.nanochat_mfu", values)))
    if found.predicted_step_s:
        predicted = found.predicted_step_s
        values = {
            "low": predicted.low_s, "expected": predicted.expected_s, "high": predicted.high_s,
            "error": predicted.expected_s / found.steady_s - 1,
        }  # fmt: skip
        rows.append((Message("row.predicted_step"), Message("value.predicted_step", values)))
    return (Table((), tuple(rows)),)


def _shares(used: Utilization) -> Rows:
    """MFU by every convention, and the peak that it is a share of."""
    values = used.model_dump()
    rows: Rows = []
    if used.peak_flop_per_s:
        rows.append((Message("row.mfu"), Message("value.mfu_full", values)))
        rows.append((Message("row.mfu_causal"), Message("value.mfu_causal", values)))
        if used.hfu is not None:
            rows.append((Message("row.hfu"), Message("value.hfu", values)))
        rows.append((Message("row.peak"), Message("value.peak", values)))
    else:
        rows.append((Message("row.mfu"), Message("value.no_peak", values)))
    if used.clock_mfu is not None:
        id = "value.at_clock" if used.clock_hfu is None else "value.at_clock_hfu"
        rows.append((Message("row.at_clock"), Message(id, values)))
    elif used.clock_ghz is not None:
        rows.append((Message("row.at_clock"), Message("value.no_clock", values)))
    rows.append((Message("row.nanogpt_mfu"), Message("value.nanogpt_mfu", values)))
    return rows


def _longer(found: LogAnalysis) -> tuple[Block, ...]:
    if not found.disturbances:
        return (Paragraph(Message("log.nothing_longer")),)
    columns = tuple(Message(f"column.{name}") for name in ("component", "steps", "range_s", "each", "lost"))
    rows = tuple(
        (
            Message(f"log_kind.{d.kind}"),
            f"{d.count:,}",
            f"{d.first_step:,}" if d.first_step == d.last_step else f"{d.first_step:,} – {d.last_step:,}",
            Message("value.longer", {"each": d.each_s, "factor": d.slower_factor}),
            Quantity(d.lost_s, "duration"),
        )
        for d in found.disturbances
    )
    values = {"lost": found.lost_s, "logged": found.logged_s, "share": min(1.0, found.lost_s / found.logged_s)}
    where = "log.evaluation_inside" if FORMATS[found.format].times_evaluation else "log.evaluation_outside"
    little = rounds_to_zero(found.lost_s / found.logged_s)
    id = "log.lost_some" if found.log_interval > 1 else "log.lost_little" if little else "log.lost"
    return Table(columns, rows, frozenset({1, 3, 4})), Paragraph(Message(id, values)), Paragraph(Message(where))


def _losses(found: LogAnalysis) -> Table:
    losses = found.losses
    rows: Rows = []
    if losses.first_loss is not None:
        values = {"first": losses.first_loss, "last": losses.last_loss}
        lost = any(note.id == "loss_not_finite" for note in found.findings)
        id = "value.train_loss_lost" if lost else "value.train_loss"
        rows.append((Message("row.train_loss"), Message(id, values)))
    if losses.best_val_loss is not None:
        values = {
            "last": losses.last_val_loss, "best": losses.best_val_loss, "step": losses.best_val_step,
            "count": losses.evaluations, "unit": loss_unit(losses.val_unit),
        }  # fmt: skip
        rows.append((Message("row.val_loss"), Message("value.val_loss", values)))
    return Table((), tuple(rows or [(Message("log.no_losses"),)]))


def _remaining(found: LogAnalysis) -> Table:
    left = found.remaining
    assert left is not None
    values = {
        "low": left.time_s.low_s, "expected": left.time_s.expected_s, "high": left.time_s.high_s,
        "steps": left.steps, "total": left.total_steps, "evaluations": left.evaluations,
    }  # fmt: skip
    id = "value.finished" if not left.steps else "value.left_with" if left.evaluations else "value.left"
    rows: Rows = [(Message("row.left"), Message(id, values))]
    if left.power is not None and left.steps:
        values = {
            "expected": left.energy_expected_j, "low": left.energy_low_j, "high": left.energy_high_j,
            "cost": left.cost_expected, "currency": left.currency,
            "watts": left.power.expected_w, "watts_low": left.power.low_w, "watts_high": left.power.high_w,
        }  # fmt: skip
        rows.append((Message("row.energy"), Message("value.energy_left", values)))
    if found.whole_run_s is not None:
        id = "value.whole_run_time" if found.whole_run_energy_j is None else "value.whole_run"
        values = {"time": found.whole_run_s.expected_s, "energy": found.whole_run_energy_j}
        values |= {"cost": found.whole_run_cost, "currency": left.currency}
        rows.append((Message("row.total_time"), Message(id, values)))
    return Table((), tuple(rows))


def _missing(found: LogAnalysis) -> tuple[Block, ...]:
    """What another option would add."""
    if not found.config_used and FORMATS[found.format].has_config:
        return (Paragraph(Message("log.give_config")),)
    return () if found.gpu_name else (Paragraph(Message("log.give_gpu")),)


def utilization_document(name: str, used: Utilization) -> Document:
    """`foretrain mfu`."""
    values = {"tokens_per_s": used.tokens_per_s, "tokens": used.tokens_per_step, "step": used.step_s}
    rows: Rows = [(Message("row.throughput"), Message("value.given_throughput", values)), *_shares(used)]
    blocks: list[Block] = [Table((), tuple(rows))]
    if used.impossible:
        blocks.append(Paragraph(Message("log_finding.beyond_peak", {"mfu": used.mfu, "gpu": used.gpu_name}), "bad"))
    if used.gpu_name in catalogue():  # which `gpus` shows with all sources of each figure
        blocks.append(Paragraph(Message("mfu.sources_at", {"gpu": used.gpu_name})))
    elif used.peak_source:
        blocks.append(Paragraph(Message("mfu.source", {"source": used.peak_source})))
    blocks.append(Paragraph(Message("mfu.conventions")))
    subtitle = Message("mfu.subtitle", {"gpu": used.gpu_name, "dtype": used.dtype})
    return Document(Message("mfu.title", {"name": name}), subtitle, [Section(Message("mfu.section"), tuple(blocks))])
