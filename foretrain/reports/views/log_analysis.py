"""What an analysis of a log says, in sections; and a card's utilization as a Document."""

from foretrain.analysis.log_analysis import LogAnalysis, LoggedMemory
from foretrain.analysis.log_checks import Utilization
from foretrain.base.messages import listed
from foretrain.base.units import rounds_to_zero
from foretrain.hardware.catalogue import catalogue
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.curves import loss_unit
from foretrain.runs.formats import FORMATS

Rows = list[tuple[Cell, ...]]


def titles(found: LogAnalysis) -> tuple[Message, Message]:
    values = {"format": FORMATS[found.format].shown, "steps": found.steps, "first": found.first_step}
    subtitle = Message("log.subtitle", {**values, "last": found.last_step, "interval": found.log_interval})
    return Message("log.title", {"name": found.name}), subtitle


def sections(found: LogAnalysis) -> list[Section]:
    """Its speed, what stands out, what took longer, its losses, what is left to do."""
    made = [Section(Message("log.speed"), _speed(found))]
    if found.findings:
        doubtful = any(f.tone == "bad" for f in found.findings)  # such a thing is said first
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
