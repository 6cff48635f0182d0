"""The analysis of a memory snapshot as a Document."""

from foretrain.analysis.snapshot_analysis import Moment, SnapshotAnalysis
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table

GROUP_ROWS = 12


def document(found: SnapshotAnalysis) -> Document:
    sections: list[Section] = []
    if found.failures:
        sections.append(Section(Message("snapshot.failure"), _failures(found)))
    if found.at_failure is not None:
        sections.append(Section(Message("snapshot.alive_failure"), _moment(found.at_failure)))
    elif found.peak is not None:
        sections.append(Section(Message("snapshot.alive_peak"), _moment(found.peak)))
    sections.append(Section(Message("snapshot.levels"), _levels(found)))
    if found.at_failure is None and found.peak is None:
        sections.append(Section(Message("snapshot.alive_end"), _moment(found.end)))
    if found.empty_segments:
        sections.append(Section(Message("snapshot.empty"), _empty(found)))
    sections.append(Section(Message("snapshot.help"), _advice(found)))
    values = {"device": found.device, "devices": found.devices, "entries": found.entries, "segments": found.segments}
    subtitle = Message("snapshot.subtitle" if found.devices == 1 else "snapshot.subtitle_many", values)
    return Document(Message("snapshot.title", {"name": found.name}), subtitle, sections)


def _failures(found: SnapshotAnalysis) -> tuple[Block, ...]:
    last = found.failures[-1]
    values = last.model_dump() | {"count": found.n_failures, "short": max(0, last.asked_bytes - last.free_bytes)}
    blocks: list[Block] = [Paragraph(Message("snapshot.ran_out", values), "bad")]
    if found.n_failures > 1:
        blocks.append(Paragraph(Message("snapshot.ran_out_often", values)))
    if last.where or last.made_by:
        values["by"] = last.where or last.made_by
        blocks.append(Paragraph(Message("snapshot.asked_by", values)))
    id = "snapshot.fragmented" if last.unused_bytes + last.free_bytes >= last.asked_bytes else "snapshot.not_fragmented"
    blocks.append(Paragraph(Message(id, values)))
    return tuple(blocks)


def _moment(moment: Moment) -> tuple[Block, ...]:
    values = moment.model_dump(exclude={"groups", "by_kind_bytes"})
    id = "snapshot.moment" if moment.reserved_bytes else "snapshot.moment_only"
    blocks: list[Block] = [Paragraph(Message(id, values))]
    if moment.by_kind_bytes:
        shares = sorted(moment.by_kind_bytes.items(), key=lambda pair: -pair[1])
        rows = tuple(
            (Message(f"memory_kind.{kind}"), Quantity(size, "bytes"), Quantity(size / _total(moment), "percent"))
            for kind, size in shares
        )
        columns = (Message("column.component"), Message("column.bytes"), Message("snapshot.share"))
        blocks.append(Table(columns, rows, frozenset({1, 2})))
    if moment.groups:
        blocks.append(_groups(moment))
    if moment.before_bytes:
        blocks.append(Paragraph(Message("snapshot.before", values)))
    return tuple(blocks)


def _total(moment: Moment) -> int:
    return max(1, sum(moment.by_kind_bytes.values()) + moment.before_bytes)


def _groups(moment: Moment) -> Table:
    columns = tuple(Message(f"column.{name}") for name in ("bytes", "count", "where", "made_by", "component"))
    rows: list[tuple[Cell, ...]] = [
        (
            Quantity(g.size_bytes, "bytes"), f"{g.count:,}", g.where or Message("snapshot.nowhere"), _short(g.made_by),
            Message(f"memory_kind.{g.kind}"),
        )
        for g in moment.groups[:GROUP_ROWS]
    ]  # fmt: skip
    rest = sum(moment.by_kind_bytes.values()) - sum(g.size_bytes for g in moment.groups[:GROUP_ROWS])
    if rest:
        rows.append((Quantity(rest, "bytes"), "", Message("snapshot.other_places"), "", ""))
    return Table(columns, tuple(rows), frozenset({0, 1}), optional=(3, 1, 4))


def _short(name: str) -> str:
    return name if len(name) <= 32 else name[:31] + "…"


def _levels(found: SnapshotAnalysis) -> tuple[Block, ...]:
    rows: list[tuple[Cell, ...]] = []

    def row(id: str, size: int | None, *, always: bool = False) -> None:
        if size or always:
            rows.append((Message(f"snapshot_row.{id}"), Quantity(size, "bytes")))

    if found.peak is not None:
        row("peak_allocated", found.peak.allocated_bytes)
        row("peak_reserved", found.peak_reserved_bytes)
    row("allocated", found.allocated_bytes, always=True)
    if found.from_profile:
        return Table((), tuple(rows), frozenset({1})), Paragraph(Message("snapshot.from_profile"))
    row("rounding", found.allocated_bytes - found.requested_bytes)
    row("pending", found.pending_bytes)
    row("split", found.split_bytes, always=True)
    row("largest_split", found.largest_split_bytes)
    row("cached", found.cached_bytes, always=True)
    row("reserved", found.reserved_bytes, always=True)
    settings = Message("snapshot.settings", {"settings": found.settings or "–"})
    return Table((), tuple(rows), frozenset({1})), Paragraph(settings), *_streams(found)


def _streams(found: SnapshotAnalysis) -> tuple[Block, ...]:
    if not found.streams:
        return ()
    columns = tuple(Message(f"snapshot_column.{name}") for name in ("stream", "reserved", "free"))
    rows = tuple(
        (f"{s.stream:#x}" if s.stream else "0", Quantity(s.reserved_bytes, "bytes"), Quantity(s.free_bytes, "bytes"))
        for s in found.streams
    )
    return Paragraph(Message("snapshot.streams_text")), Table(columns, rows, frozenset({1, 2}))


def _empty(found: SnapshotAnalysis) -> tuple[Block, ...]:
    columns = tuple(Message(f"snapshot_column.{name}") for name in ("segment", "used", "blocks", "held_by"))
    rows = tuple(
        (
            Quantity(s.size_bytes, "bytes"), Quantity(s.used_bytes, "bytes"), f"{s.blocks:,}",
            (s.held_by.where or s.held_by.made_by or "–") if s.held_by else Message("snapshot.pending"),
        )
        for s in found.empty_segments
    )  # fmt: skip
    values = {"count": found.n_empty_segments, "size": found.empty_segments_bytes}
    return Paragraph(Message("snapshot.empty_text", values)), Table(columns, rows, frozenset({0, 1, 2}))


def _advice(found: SnapshotAnalysis) -> tuple[Block, ...]:
    if not found.advice:
        return (Paragraph(Message("snapshot.no_advice")),)
    return tuple(Paragraph(Message(f"snapshot_help.{id}")) for id in found.advice)
