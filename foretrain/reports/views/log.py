"""A log, or a run that `foretrain watch` measured, as a Document: its steps, the command's use of the machine, its
cards.
"""

import shlex

from foretrain.analysis.log_analysis import LogAnalysis, LoggedMemory
from foretrain.analysis.log_checks import Utilization
from foretrain.app.explain import LogExplanation
from foretrain.app.run_report import LogFacts
from foretrain.base.messages import listed
from foretrain.base.units import rounds_to_zero
from foretrain.hardware.card import SLOWING
from foretrain.hardware.catalogue import catalogue
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
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views.curves import loss_unit
from foretrain.reports.views.memory import phase_bars, verdicts
from foretrain.reports.views.run_explain import out_of_memory, remedy_blocks
from foretrain.reports.views.takes import figures_of
from foretrain.reports.views.trainer_run import change_blocks
from foretrain.runs.formats import FORMATS
from foretrain.runs.record import WatchedCard, WatchedRun


def document(explained: LogExplanation, facts: LogFacts | None = None) -> Document:
    """Return how memory ran out, what `foretrain watch` measured, the log itself. `facts`: its curves and plan."""
    log, record = explained.log, explained.watched
    sections = [_first(explained), *(_curves(facts, watched=record is not None) if facts else [])]
    sections += _ran_out(explained)
    sections += _machine_sections(record) if record is not None else []
    sections += _analysis_sections(log) if log is not None else []
    sections += _surroundings(facts, read=log is not None) if facts else []
    if record is not None:
        title = Message("watch.title", {"command": command_text(record)})
        return Document(title, subtitle(record), sections)
    titles = _titles(log) if log else (Message("oom.log_title"), Message("oom.log_subtitle"))
    return Document(*titles, sections)


def _first(explained: LogExplanation) -> Section:
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
    if facts.plan is not None and facts.outlook is not None:
        memory = facts.plan.memory_of("nanogpt")
        blocks = (phase_bars(facts.plan, memory), *verdicts(facts.plan, memory))
        return [Section(Message("report.memory"), blocks), *outlook_view.sections(facts.plan, facts.outlook)]
    return [Section(Message("report.more"), (Paragraph(Message("report.give_config")),))] if read else []


def _verdict(explained: LogExplanation) -> tuple[Paragraph, ...]:
    found = explained.log
    lead = [Paragraph(Message("report.log_died"), "bad")] if explained.out_of_memory else []
    if found is None:
        return tuple(lead)
    values = {"steps": found.steps, "last": found.last_step, "step": found.steady_s, "lost": found.lost_s}
    id = "report.log_said_no_times" if found.steady_s is None else "report.log_said"
    return (*lead, Paragraph(Message(id, values)))


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
        held = record.highest_bytes
        joules = sum(card.energy_j or 0.0 for card in record.cards)
        items += [
            ("wall", Quantity(record.wall_s, "duration"), measured),
            ("memory", Quantity(held, "bytes") if held else None, measured),
            ("energy", Quantity(joules, "energy") if joules else None, measured),
        ]
    return figures_of(items)


Rows = list[tuple[Cell, ...]]


def _titles(found: LogAnalysis) -> tuple[Message, Message]:
    values = {"format": FORMATS[found.format].shown, "steps": found.steps, "first": found.first_step}
    subtitle = Message("log.subtitle", {**values, "last": found.last_step, "interval": found.log_interval})
    return Message("log.title", {"name": found.name}), subtitle


def _analysis_sections(found: LogAnalysis) -> list[Section]:
    """Its speed, what stands out, what took longer, its losses, what is left to do."""
    made = [Section(Message("log.speed"), _speed(found))]
    if found.findings:
        doubtful = any(f.tone == "bad" for f in found.findings)  # it comes first
        blocks = tuple(
            Paragraph(Message(f"log_finding.{f.id}", f.values | _named(f.values)), f.tone) for f in found.findings
        )
        made.insert(0 if doubtful else 1, Section(Message("log.findings"), blocks))
    made.append(Section(Message("log.longer"), _longer(found)))
    made.append(Section(Message("log.losses"), (_losses(found),)))
    if found.remaining:
        made.append(Section(Message("log.remaining"), (_remaining(found),)))
    missing = _missing(found)
    if missing:
        made.append(Section(Message("log.missing"), missing))
    return made


def _named(values: dict[str, object]) -> dict[str, object]:
    what = values.get("what")
    return {"what": listed(Message(f"log_what.{id}").text() for id in what)} if isinstance(what, list) else {}


def _speed(found: LogAnalysis) -> tuple[Block, ...]:
    rows: Rows = [(Message("row.steady_step"), _step(found))]
    if found.mean_step_s is not None:
        rows.append((Message("row.mean_step"), Message("value.mean_step", {"mean": found.mean_step_s})))
    if found.tokens_per_s and found.tokens_per_step:
        source = Message(f"tokens_from.{found.tokens_source}")
        values = {"tokens_per_s": found.tokens_per_s, "tokens": found.tokens_per_step, "source": source}
        rows.append((Message("row.throughput"), Message("value.logged_throughput", values)))
    elif found.tokens_per_s:
        values = {"tokens_per_s": found.tokens_per_s}
        rows.append((Message("row.throughput"), Message("value.printed_throughput", values)))
    if found.tokens_per_gpu_s:
        values = {"tokens_per_s": found.tokens_per_gpu_s}
        rows.append((Message("row.throughput"), Message("value.throughput_per_gpu", values)))
    if found.utilization:
        rows += _shares(found.utilization)
    if found.logged_mfu is not None:
        rows.append((Message("row.logged_mfu"), Message("value.logged_mfu", {"mfu": found.logged_mfu})))
    if found.nanochat_mfu is not None:
        values = {"mfu": found.nanochat_mfu, "gpu": found.gpu_name}
        rows.append((Message("row.mfu"), Message("value.nanochat_mfu", values)))
    if found.predicted_step_s and found.steady_s:
        predicted = found.predicted_step_s
        values = {
            "low": predicted.low_s, "expected": predicted.expected_s, "high": predicted.high_s,
            "error": predicted.expected_s / found.steady_s - 1,
        }  # fmt: skip
        rows.append((Message("row.predicted_step"), Message("value.predicted_step", values)))
    rows += _memory(found.memory) if found.memory else []
    return (Table((), tuple(rows)),)


def _step(found: LogAnalysis) -> Message:
    if found.steady_s is None:
        return Message("value.no_step_time")
    step = {"median": found.steady_s, "low": found.steady_low_s, "high": found.steady_high_s}
    id = "value.steady_step" if found.steady_steps >= 10 else "value.steady_few"
    return Message(id, {**step, "count": found.steady_steps})


def _memory(memory: LoggedMemory) -> Rows:
    figures = {
        "reserved": memory.reserved_bytes, "active": memory.active_bytes, "allocated": memory.allocated_bytes,
        "device": memory.device_bytes,
    }  # fmt: skip
    return [
        (Message("row.logged_memory"), Message(f"logged_memory.{kind}", {"size": size}))
        for kind, size in figures.items()
        if size is not None
    ]


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
    if found.steady_s is None:
        return (Paragraph(Message("value.no_step_time")),)
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
    program = FORMATS[found.format]
    inside = "log.evaluation_between" if program.own_evaluations else "log.evaluation_inside"
    where = inside if program.times_evaluation else "log.evaluation_outside"
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
    if found.learning_rate is not None:
        rows.append((Message("row.logged_rate"), Message("value.logged_rate", {"rate": found.learning_rate})))
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
    if not found.config_used and FORMATS[found.format].has_config:
        return (Paragraph(Message("log.give_config")),)
    return () if found.gpu_name or not FORMATS[found.format].has_config else (Paragraph(Message("log.give_gpu")),)


def utilization_document(name: str, used: Utilization) -> Document:
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


NAMED_SHARE = 0.05  # reasons for a lower clock that were there less often say nothing
MAX_COMMAND = 48
_MEMORY = {
    "processes": "watch_value.card_processes", "rise": "watch_value.card_rise", "nothing": "watch_value.card_used",
}  # fmt: skip


def summary(record: WatchedRun, path: str) -> Document:
    sections = _machine_sections(record)
    sections.append(Section(Message("watch.next"), (Paragraph(Message("watch.explain", {"path": path})),)))
    return Document(Message("watch.title", {"command": command_text(record)}), subtitle(record), sections)


def command_text(record: WatchedRun) -> str:
    text = shlex.join(record.command)
    return text if len(text) <= MAX_COMMAND else text[: MAX_COMMAND - 1] + "…"


def subtitle(record: WatchedRun) -> Message:
    """How it ended and how long it took."""
    values = {"wall": record.wall_s, "code": record.exit_code, "signal": record.signal}
    return Message(f"watch.{record.status}", values)


def _machine_sections(record: WatchedRun) -> list[Section]:
    """Processes, then each card that did something, or why there is none."""
    sections = [Section(Message("watch.process"), (Table((), tuple(_process(record))),))]
    cards = [card for card in record.cards if card.ours_peak_bytes or card.busy] or list(record.cards)
    sections += [
        Section(Message("watch.card", {"index": card.index, "name": card.name}), _card(card)) for card in cards
    ]
    if record.nvml_problem:
        id = "watch.nvml_broke" if record.cards else "watch.no_nvml"
        values = {"reason": record.nvml_problem}
        paragraph = Paragraph(Message(id, values), "warn" if record.cards else "plain")
        sections.append(Section(Message("watch.nvml"), (paragraph,)))
    return sections


def _process(record: WatchedRun) -> Rows:
    rows: Rows = [(Message("watch_row.wall"), Quantity(record.wall_s, "duration"))]
    if record.cpu_s is not None and record.wall_s:
        values = {"cpu": record.cpu_s, "cores": record.cpu_s / record.wall_s}
        rows.append((Message("watch_row.cpu_time"), Message("watch_value.cpu_time", values)))
    if record.rss_peak_bytes is not None:
        values = {"size": record.rss_peak_bytes, "count": record.processes}
        id = "watch_value.host_memory_shared" if record.processes > 1 else "watch_value.host_memory"
        rows.append((Message("watch_row.host_memory"), Message(id, values)))
    if record.steps_done:
        values = {"steps": record.steps_done, "last": record.last_step, "step": record.step_s or 0.0}
        id = "watch_value.watched_steps" if record.step_s else "watch_value.watched_steps_only"
        rows.append((Message("watch_row.watched_log"), Message(id, values)))
    else:
        rows.append((Message("watch_row.watched_log"), Message("watch_value.watched_nothing")))
    if record.samples:
        values = {"count": record.samples, "interval": record.interval_s}
        share = record.sampling_s / record.wall_s if record.wall_s else 0.0
        id = "watch_value.samples_free" if rounds_to_zero(share) else "watch_value.samples"
        rows.append((Message("watch_row.samples"), Message(id, {**values, "share": share})))
    return rows


def _card(card: WatchedCard) -> tuple[Block, ...]:
    rows: Rows = []
    if card.ours_peak_bytes is not None and card.used_by_others_peak_bytes is not None:
        values = {
            "ours": card.ours_peak_bytes,
            "others": card.used_by_others_peak_bytes,
            "total": card.total_bytes or 0,
        }
        rows.append((Message("watch_row.card_memory"), Message(_MEMORY[card.by], values)))
    elif card.used_peak_bytes:
        used = Message("watch_value.card_used", {"used": card.used_peak_bytes})
        rows.append((Message("watch_row.card_memory"), used))
    if card.busy is not None:
        rows.append((Message("watch_row.card_busy"), Quantity(card.busy, "percent")))
    if card.clock_ghz is not None:
        values = {"mean": card.clock_ghz, "most": card.clock_max_ghz or card.clock_ghz}
        rows.append((Message("watch_row.card_clock"), Message("watch_value.card_clock", values)))
    if card.energy_j:
        values = {"energy": card.energy_j, "watts": card.power_w or 0.0}
        id = "watch_value.card_energy" if card.energy_by == "counter" else "watch_value.card_energy_summed"
        rows.append((Message("watch_row.card_energy"), Message(id, values)))
    if card.temperature_max_c is not None:
        rows.append((Message("watch_row.card_temperature"), f"{card.temperature_max_c} °C"))
    blocks: list[Block] = [Table((), tuple(rows))] if rows else [Paragraph(Message("watch.card_silent"))]
    return *blocks, *slowed(card.reasons)


def slowed(reasons: dict[str, float]) -> tuple[Paragraph, ...]:
    """What held the clock down, as NVML names it; most often first."""
    named = [(name, share) for name, share in reasons.items() if name in SLOWING and share >= NAMED_SHARE]
    return tuple(
        Paragraph(Message(f"clock_reason.{name}", {"share": share}), "plain" if name == "power_cap" else "warn")
        for name, share in sorted(named, key=lambda pair: -pair[1])
    )
