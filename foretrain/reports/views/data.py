"""Datasets as Documents: `foretrain data info` and `foretrain data mix`."""

from typing import TYPE_CHECKING

from foretrain.base.messages import listed
from foretrain.data.dataset import DatasetInfo
from foretrain.data.inspection import DatasetSummary
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table

if TYPE_CHECKING:  # it comes with numpy
    from foretrain.data.prepare.estimate import PreparePlan

_UNKNOWN = "–"


def info_document(summary: DatasetSummary) -> Document:
    info = summary.dataset
    values = {"format": info.format, "path": info.path, "url": info.remote}
    sections = [Section(Message("data.splits"), _splits(summary))]
    if summary.parts:
        sections.append(Section(Message("data.parts"), (_parts(info, None),)))
    sections.append(Section(Message("data.about"), (_about(summary),)))
    if lengths := _lengths(summary):
        sections.append(Section(Message("data.lengths"), (lengths,)))
    subtitle = Message("data.subtitle_remote" if info.remote else "data.subtitle", values)
    return Document(Message("data.title", {"name": info.name}), subtitle, sections)


def mix_document(info: DatasetInfo, tokens: int | None, path: str | None) -> Document:
    """`foretrain data mix`; `tokens`: trained tokens that epochs are for."""
    blocks: list[Block] = [_parts(info, tokens)]
    if tokens:
        blocks.append(Paragraph(Message("data.mix_epochs", {"tokens": tokens})))
    title = Message("data.mix_title", {"count": len(info.parts)})
    written = Message("data.mix_written", {"path": path}) if path else Message("data.mix_not_written")
    return Document(title, written, [Section(Message("data.parts"), tuple(blocks))])


def _count(value: int | None) -> Cell:
    return _UNKNOWN if value is None else f"{value:,}"


def _splits(summary: DatasetSummary) -> tuple[Block, ...]:
    rows: list[tuple[Cell, ...]] = []
    for name, split in summary.splits.items():
        mean = f"{split.tokens / split.documents:,.0f}" if split.documents else _UNKNOWN
        per_byte = split.tokens_per_byte
        rows.append(
            (
                name, _count(split.tokens), _count(split.documents), mean,
                f"{per_byte:.4f}" if per_byte else _UNKNOWN, str(split.files), Quantity(split.size_bytes, "bytes"),
            )
        )  # fmt: skip
    names = ("split", "tokens", "documents", "mean_length", "tokens_per_byte", "files", "size")
    columns = tuple(Message(f"column.{name}") for name in names)
    table = Table(columns, tuple(rows), frozenset(range(1, 7)))
    if summary.parts or any(split.documents is not None for split in summary.splits.values()):
        return (table,)
    counted = any(split.max_id is not None for split in summary.splits.values())
    return table, Paragraph(Message("data.no_separator" if counted else "data.not_counted"))


def _about(summary: DatasetSummary) -> Table:
    info = summary.dataset
    lows = [split.min_id for split in summary.splits.values() if split.min_id is not None]
    highs = [split.max_id for split in summary.splits.values() if split.max_id is not None]
    rows: list[tuple[Cell, Cell]] = [
        (Message("data.tokenizer"), info.tokenizer or Message("data.unknown")),
        (Message("data.vocab_size"), f"{info.vocab_size:,}" if info.vocab_size else Message("data.unknown")),
        (Message("data.dtype"), info.dtype),
    ]
    if lows:
        rows.append((Message("data.ids"), f"{min(lows):,} – {max(highs):,}"))
    if summary.source:
        rows.append((Message("data.source"), summary.source))
    if summary.shard_tokens:
        rows.append((Message("data.shards"), Quantity(summary.shard_tokens, "count")))
    if summary.duplicates is not None:
        rows.append((Message("data.duplicates"), f"{summary.duplicates:,}"))
    rows.append(
        (Message("data.digests"), Message("data.with_digests" if summary.has_checksums else "data.without_digests"))
    )
    rows.append((Message("data.fingerprint"), info.fingerprint or Message("data.unknown")))
    return Table((), tuple(rows))


def _lengths(summary: DatasetSummary) -> Table | None:
    found = {name: split.length_histogram for name, split in summary.splits.items() if split.length_histogram}
    used = [b for counts in found.values() for b, count in enumerate(counts) if count]
    if not used:
        return None
    last = max(len(counts) for counts in found.values()) - 1
    rows: list[tuple[Cell, ...]] = []
    for bin in range(min(used), max(used) + 1):
        first = 2 ** (bin - 1) if bin else 0
        id = "data.lengths_from" if bin == last else "data.lengths_range"
        counts = tuple(f"{counts[bin]:,}" for counts in found.values())
        rows.append((Message(id, {"first": first, "last": 2**bin - 1}), *counts))
    columns = (Message("column.length"), *found)
    return Table(columns, tuple(rows), frozenset(range(len(columns))))


def _parts(info: DatasetInfo, tokens: int | None) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for part in info.parts:
        own = part.dataset
        row: list[Cell] = [own.name, Quantity(part.weight, "percent"), _count(own.train_tokens)]
        if tokens:
            row += [_count(round(tokens * part.weight)), f"{tokens * part.weight / own.train_tokens:,.2f}"]
        rows.append((*row, own.remote or own.path))
    names = ["dataset", "share", "tokens", *(["takes_tokens", "epochs"] if tokens else []), "where"]
    columns = tuple(Message(f"column.{name}") for name in names)
    return Table(columns, tuple(rows), frozenset(range(1, len(names) - 1)))


def preparation_document(plan: "PreparePlan", out: str) -> Document:
    unknown = Message("prepare.unknown")
    kinds = listed(f"{count} {suffix}" for suffix, count in list(plan.left_out.items())[:4])
    files: Cell = unknown
    if plan.source_bytes is not None:
        files = Message("prepare.files", {"files": plan.files, "size": plan.source_bytes}).text()
        files += Message("prepare.left_out", {"kinds": kinds}).text() if kinds else ""
    rows: list[tuple[Cell, Cell]] = [(Message("prepare.source"), files)]
    if plan.read_bytes is not None:
        verb = "prepare.download" if plan.remote else "prepare.read"
        rows.append((Message(verb), Message("calibration.bytes", {"size": plan.read_bytes})))
    if plan.tokens is not None:
        values = {"size": plan.text_bytes, "documents": plan.documents}
        rows.append((Message("prepare.text"), Message("prepare.text_value", values)))
        part = plan.tokens != plan.tokens_in_source
        values = {"tokens": plan.tokens, "all": plan.tokens_in_source, "ratio": plan.bytes_per_token}
        rows.append(
            (Message("prepare.tokens"), Message("prepare.tokens_of" if part else "prepare.tokens_value", values))
        )
    values = {"name": plan.tokenizer, "vocab": plan.vocab_size, "dtype": plan.dtype}
    rows.append((Message("prepare.tokenizer"), Message("prepare.tokenizer_value", values)))
    values = {"size": plan.output_bytes, "shards": plan.shards, "free": plan.free_bytes}
    known = plan.output_bytes is not None
    rows.append((Message("prepare.disk"), Message("prepare.disk_value" if known else "prepare.disk_unknown", values)))
    values = {"size": plan.memory_bytes, "workers": plan.workers}
    rows.append((Message("prepare.memory"), Message("prepare.memory_value", values)))
    if plan.duration_s is not None:
        values = {"time": plan.duration_s, "rate": plan.tokens_per_s}
        rows.append((Message("prepare.time"), Message("prepare.time_value", values)))
    blocks: list[Block] = [Table((), tuple(rows))]
    if not plan.fits:
        values = {"needs": plan.output_bytes, "free": plan.free_bytes}
        blocks.append(Paragraph(Message("prepare.too_full", values), "bad"))
    if plan.sampled_documents:
        values = {"documents": plan.sampled_documents, "size": plan.sampled_bytes}
        subtitle = Message("prepare.subtitle", values)
    else:
        subtitle = Message("prepare.subtitle_unknown")
    title = Message("prepare.title", {"description": plan.description, "out": out})
    return Document(title, subtitle, [Section(Message("prepare.section"), tuple(blocks))])
