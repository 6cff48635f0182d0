"""A watched command as a Document: what it took of the machine, and what its cards did."""

import shlex

from foretrain.base.units import rounds_to_zero
from foretrain.hardware.card import SLOWING
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.runs.record import WatchedCard, WatchedRun

Rows = list[tuple[Cell, ...]]
NAMED_SHARE = 0.05  # reasons for a lower clock that were there less often say nothing
MAX_COMMAND = 48
_MEMORY = {
    "processes": "watch_value.card_processes", "rise": "watch_value.card_rise", "nothing": "watch_value.card_used",
}  # fmt: skip


def summary(record: WatchedRun, path: str) -> Document:
    """What is said when the command has ended."""
    sections = machine_sections(record)
    sections.append(Section(Message("watch.next"), (Paragraph(Message("watch.explain", {"path": path})),)))
    return Document(Message("watch.title", {"command": command_text(record)}), subtitle(record), sections)


def command_text(record: WatchedRun) -> str:
    text = shlex.join(record.command)
    return text if len(text) <= MAX_COMMAND else text[: MAX_COMMAND - 1] + "…"


def subtitle(record: WatchedRun) -> Message:
    """How it ended and how long it took."""
    values = {"wall": record.wall_s, "code": record.exit_code, "signal": record.signal}
    return Message(f"watch.{record.status}", values)


def machine_sections(record: WatchedRun) -> list[Section]:
    """Processes, then each card that did something, or why there is none."""
    sections = [Section(Message("watch.process"), (Table((), tuple(_process(record))),))]
    cards = [card for card in record.cards if card.ours_peak_bytes or card.busy] or list(record.cards)
    sections += [
        Section(Message("watch.card", {"index": card.index, "name": card.name}), _card(card)) for card in cards
    ]
    if record.nvml_problem:
        id = "watch.nvml_broke" if record.cards else "watch.no_nvml"
        values = {"reason": record.nvml_problem}
        said = Paragraph(Message(id, values), "warn" if record.cards else "plain")
        sections.append(Section(Message("watch.nvml"), (said,)))
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
