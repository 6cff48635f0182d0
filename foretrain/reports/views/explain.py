"""An Explanation as a Document, and the tables that any explanation has."""

from collections.abc import Sequence

from foretrain.advice.asked import Asked
from foretrain.analysis.components import Line, Sum, TensorGroup
from foretrain.analysis.explanation import ExplainedPhase, Explanation
from foretrain.analysis.snapshot_analysis import Moment, SnapshotAnalysis
from foretrain.base.messages import listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import Component
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views import lead
from foretrain.reports.views.shared import assumed

PHASE_ROWS = 12  # of tensors
MOST_NAMES = 3  # of weights of one size
TENSOR_ROWS = 16
BECAUSE = {
    "logits": "explain.because_logits", "activations": "explain.because_activations",
    "optimizer": "explain.because_optimizer",
}  # fmt: skip
CONTEXT_DOUBTS = {"too_little", "too_much", "below"}


def document(found: Explanation, plan: AnyPlan) -> Document:
    """Where the memory goes, of fine-tuning in each phase, the worst one first, and what nvidia-smi shows of it."""
    plan = rank_of(plan) if isinstance(plan, ClusterPlan) else plan
    if isinstance(plan, Plan):
        title, source = Message("explain.title", {"name": plan.name}), {"gpu": plan.place, "source": found.source}
        subtitle, sections = Message("explain.subtitle", source), _of_pretraining(found, plan)
    else:
        title, subtitle = lead.title(plan, Asked()), Message("finetune.subtitle", {"where": plan.where})
        tuned = isinstance(plan, FineTunePlan) and found.source == "estimated"
        letters = (Paragraph(Message("finetune.letters")),) if tuned else ()
        others = (phase for phase in found.phases if phase is not found.worst)
        phases = (_phase(plan, phase) for phase in (found.worst, *others))
        sections = [Section(Message("finetune.verdict"), (*lead.lead_of(plan), *letters)), *phases]
    if found.lines:
        sections.append(Section(Message("explain.smi"), _smi(found)))
    return Document(title, subtitle, sections)


def _of_pretraining(found: Explanation, plan: Plan) -> list[Section]:
    worst, weights = found.worst.memory, 4 * plan.counts.n_params
    mode = "compiled" if found.compiled else "eager"
    values = {
        "step": Message(f"step.{found.step}"), "mode": Message(f"mode.{mode}"),
        "phase": Message(f"phase.{worst.phase}"), "moment": Message(f"moment.{worst.moment}"),
        "allocated": worst.allocated_bytes, "params": plan.counts.n_params,
        "weights": weights, "share": weights / worst.allocated_bytes,
    }  # fmt: skip
    why = (Paragraph(Message(BECAUSE[found.because.id], found.because.values)),) if found.because else ()
    answer = (Paragraph(Message("explain.peak", values)), *why, *assumed(plan), sums_table(found.worst.sums))
    alive = [Section(Message("explain.alive"), (_tensors(found.worst.tensors),))] if found.worst.tensors else []
    return [Section(Message("explain.answer"), answer), *alive]


def _phase(plan: FineTunePlan | InferencePlan, phase: ExplainedPhase) -> Section:
    if isinstance(plan, InferencePlan):
        return Section(Message("inference.memory"), (sums_table(phase.sums, plan),))
    values = {"phase": Message(f"phase.{phase.memory.phase}"), "allocated": phase.memory.allocated_bytes}
    blocks: list[Block] = [sums_table(phase.sums, plan)]
    if phase.tensors:
        columns = tuple(Message(f"column.{name}") for name in ("bytes", "count", "tensor", "where"))
        rows = tuple(_weights(plan, tensor) for tensor in phase.tensors[:PHASE_ROWS])
        blocks.append(Table(columns, rows, frozenset({0, 1})))
    return Section(Message("finetune.explained", values), tuple(blocks))


def _weights(plan: FineTunePlan, tensor: TensorGroup) -> tuple[Cell, ...]:
    names = tensor.where.split(", ")
    where: Cell = component_of(plan, tensor.component)
    if tensor.where:
        values = {"names": ", ".join(names[:MOST_NAMES]), "more": len(names) - MOST_NAMES, "component": where}
        where = Message("finetune.of_weights_more" if len(names) > MOST_NAMES else "finetune.of_weights", values)
    return Quantity(tensor.size_bytes, "bytes"), f"{tensor.count:,}", tensor.what, where


def component_of(plan: FineTunePlan | InferencePlan | None, id: str) -> Message:
    if isinstance(plan, FineTunePlan) and id == "gradients":
        return Message("finetune.gradients", {"dtypes": listed(plan.counts.gradient_dtypes)})
    if isinstance(plan, InferencePlan):
        with_nccl = id == "overhead" and plan.asked.split == "tensor"
        return Message("inference.part.overhead_nccl" if with_nccl else f"inference.part.{id}")
    return Message(f"component.{id}")


def sums_table(sums: Sequence[Sum | Component], plan: FineTunePlan | InferencePlan | None = None) -> Table:
    """List each component with its formula, in numbers too; what is too small is one row."""
    numbers = [row.numbers if isinstance(row, Sum) else "" for row in sums]
    names = ("component", "bytes", "formula", "numbers")[: 4 if any(numbers) else 3]
    names = names if any(row.formula for row in sums) else names[:2]
    columns = tuple(Message(f"column.{name}") for name in names)
    total = sum(row.size_bytes for row in sums)
    rows: list[tuple[Cell, ...]] = [
        (component_of(plan, row.id), Quantity(row.size_bytes, "bytes"), row.formula, number)
        for row, number in zip(sums, numbers, strict=True)
        if row.size_bytes * 2000 >= total
    ]
    rest = sum(row.size_bytes for row in sums if row.size_bytes * 2000 < total)
    if rest:
        rows.append((Message("component.rest"), Quantity(rest, "bytes"), "", ""))
    total_id = "inference.total" if isinstance(plan, InferencePlan) else "component.total"
    rows.append((Message(total_id), Quantity(total, "bytes"), "", ""))
    return Table(columns, tuple(row[: len(names)] for row in rows), frozenset({1}))


def _tensors(tensors: Sequence[TensorGroup]) -> Table:
    columns = tuple(Message(f"column.{name}") for name in ("bytes", "count", "tensor", "where", "made_by", "component"))
    rows: list[tuple[Cell, ...]] = [
        (
            Quantity(group.size_bytes, "bytes"), f"{group.count:,}", group.what, _name(group),
            _short(group.op), Message(f"component.{group.component}"),
        )
        for group in tensors[:TENSOR_ROWS]
    ]  # fmt: skip
    rest = tensors[TENSOR_ROWS:]
    if rest:
        size = Quantity(sum(group.size_bytes for group in rest), "bytes")
        rows.append((size, f"{sum(group.count for group in rest):,}", "", Message("component.rest"), "", ""))
    return Table(columns, tuple(rows), frozenset({0, 1, 2}), optional=(4, 5, 1, 2))


def _name(group: TensorGroup) -> Cell:
    return group.where if group.where and group.component != "logits" else Message(f"tensor.{group.role}")


def _short(name: str, most: int = 36) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _smi(found: Explanation) -> tuple[Block, ...]:
    """What nvidia-smi shows, line by line, and what that says."""
    columns = tuple(Message(f"column.{name}") for name in ("line", "bytes", "source"))
    rows = tuple((Message(f"smi.{line.id}"), _range(line), Message(f"source_of.{line.source}")) for line in found.lines)
    blocks: list[Block] = [Table(columns, rows, frozenset({1}))]
    values = {"mode": Message(f"mode.{'eager' if found.compiled else 'compiled'}"), "other": found.other_mode_bytes}
    if found.conclusion != "none":
        tone = "warn" if found.conclusion in CONTEXT_DOUBTS else "good"
        blocks.append(Paragraph(Message(f"smi.is.{found.conclusion}", values), tone))
        process = next((line for line in found.lines if line.id == "process" and line.source == "observed"), None)
        if process is not None and (found.other_mode_bytes or 0) > process.low_bytes:
            blocks.append(Paragraph(Message("smi.other_excluded", values)))
    return (*blocks, Paragraph(Message("smi.why_more")))


def _range(line: Line) -> Cell:
    if line.low_bytes == line.high_bytes:
        return Quantity(line.low_bytes, "bytes")
    return Quantity((line.low_bytes, line.high_bytes), "bytes_range")


GROUP_ROWS = 12


def snapshot_document(found: SnapshotAnalysis) -> Document:
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
            Quantity(g.size_bytes, "bytes"), f"{g.count:,}", g.where or Message("snapshot.nowhere"),
            _short(g.made_by, 32), Message(f"memory_kind.{g.kind}"),
        )
        for g in moment.groups[:GROUP_ROWS]
    ]  # fmt: skip
    rest = sum(moment.by_kind_bytes.values()) - sum(g.size_bytes for g in moment.groups[:GROUP_ROWS])
    if rest:
        rows.append((Quantity(rest, "bytes"), "", Message("snapshot.other_places"), "", ""))
    return Table(columns, tuple(rows), frozenset({0, 1}), optional=(3, 1, 4))


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
