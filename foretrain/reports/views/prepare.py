"""What a preparation will take, as a document."""

from foretrain.base.messages import listed
from foretrain.data.prepare.estimate import PreparePlan
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Section, Table


def document(plan: PreparePlan, out: str) -> Document:
    """One row for each thing that is read, written, held or waited for."""
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
