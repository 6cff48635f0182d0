"""An Explanation as a Document, and the tables that any explanation has."""

from collections.abc import Callable, Mapping, Sequence

from foretrain.analysis.components import Explanation, Line, Sum, TensorGroup
from foretrain.predict.memory import Component
from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.shared import assumed

TENSOR_ROWS = 16
BECAUSE = {
    "logits": "explain.because_logits", "activations": "explain.because_activations",
    "optimizer": "explain.because_optimizer",
}  # fmt: skip
CONTEXT_DOUBTS = {"too_little", "too_much", "below"}


def document(plan: Plan, explanation: Explanation) -> Document:
    worst = explanation.phase
    mode = "compiled" if explanation.compiled else "eager"
    values = {
        "step": Message(f"step.{explanation.step}"), "mode": Message(f"mode.{mode}"),
        "phase": Message(f"phase.{worst.phase}"), "moment": Message(f"moment.{worst.moment}"),
        "allocated": worst.allocated_bytes, "params": plan.counts.n_params,
        "weights": 4 * plan.counts.n_params, "share": 4 * plan.counts.n_params / worst.allocated_bytes,
    }  # fmt: skip
    sections = [
        Section(
            Message("explain.answer"),
            (
                Paragraph(Message("explain.peak", values)),
                *_because(explanation),
                *assumed(plan),
                sums_table(explanation.sums),
            ),
        )
    ]
    if explanation.tensors:
        sections.append(Section(Message("explain.alive"), (_tensors(explanation),)))
    if explanation.lines:
        sections.append(Section(Message("explain.smi"), _smi(explanation)))
    title = Message("explain.title", {"name": plan.name})
    return Document(title, Message("explain.subtitle", {"gpu": plan.place, "source": explanation.source}), sections)


def _because(explanation: Explanation) -> tuple[Block, ...]:
    found = explanation.because
    return () if found is None else (Paragraph(Message(BECAUSE[found.id], found.values)),)


def _component(id: str) -> Message:
    return Message(f"component.{id}")


def sums_table(
    sums: Sequence[Sum | Component], named: Callable[[str], Message] = _component, total_id: str = "component.total"
) -> Table:
    """List each component with its formula, in numbers too; what is too small is one row."""
    numbers = [row.numbers if isinstance(row, Sum) else "" for row in sums]
    names = ("component", "bytes", "formula", "numbers")[: 4 if any(numbers) else 3]
    names = names if any(row.formula for row in sums) else names[:2]
    columns = tuple(Message(f"column.{name}") for name in names)
    total = sum(row.size_bytes for row in sums)
    rows: list[tuple[Cell, ...]] = [
        (named(row.id), Quantity(row.size_bytes, "bytes"), row.formula, number)
        for row, number in zip(sums, numbers, strict=True)
        if row.size_bytes * 2000 >= total
    ]
    rest = sum(row.size_bytes for row in sums if row.size_bytes * 2000 < total)
    if rest:
        rows.append((Message("component.rest"), Quantity(rest, "bytes"), "", ""))
    rows.append((Message(total_id), Quantity(total, "bytes"), "", ""))
    return Table(columns, tuple(row[: len(names)] for row in rows), frozenset({1}))


def _tensors(explanation: Explanation) -> Table:
    columns = tuple(Message(f"column.{name}") for name in ("bytes", "count", "tensor", "where", "made_by", "component"))
    rows: list[tuple[Cell, ...]] = [
        (
            Quantity(group.size_bytes, "bytes"), f"{group.count:,}", f"{group.shape} {group.dtype}", _name(group),
            _short(group.op), Message(f"component.{group.component}"),
        )
        for group in explanation.tensors[:TENSOR_ROWS]
    ]  # fmt: skip
    rest = explanation.tensors[TENSOR_ROWS:]
    if rest:
        size = Quantity(sum(group.size_bytes for group in rest), "bytes")
        rows.append((size, f"{sum(group.count for group in rest):,}", "", Message("component.rest"), "", ""))
    return Table(columns, tuple(rows), frozenset({0, 1, 2}), optional=(4, 5, 1, 2))


def _name(group: TensorGroup) -> Cell:
    return group.where if group.where and group.component != "logits" else Message(f"tensor.{group.role}")


def _short(op: str) -> str:
    return op if len(op) <= 36 else op[:35] + "…"


def _smi(explanation: Explanation) -> tuple[Block, ...]:
    other = "eager" if explanation.compiled else "compiled"
    values = {"mode": Message(f"mode.{other}"), "other": explanation.other_mode_bytes}
    observed = (line for line in explanation.lines if line.id == "process" and line.source == "observed")
    process = next(observed, None)
    beyond = process is not None and explanation.other_mode_bytes > process.low_bytes
    excluded = explanation.conclusion != "none" and beyond
    more = (Paragraph(Message("smi.other_excluded", values)),) if excluded else ()
    return nvidia_smi(explanation.lines, explanation.conclusion, values, more)


def nvidia_smi(
    lines: tuple[Line, ...],
    conclusion: str,
    values: Mapping[str, object] | None = None,
    more: tuple[Paragraph, ...] = (),
) -> tuple[Block, ...]:
    """What nvidia-smi shows, line by line, and what that says. `more`: what follows the conclusion."""
    columns = tuple(Message(f"column.{name}") for name in ("line", "bytes", "source"))
    rows = tuple((Message(f"smi.{line.id}"), _range(line), Message(f"source_of.{line.source}")) for line in lines)
    blocks: list[Block] = [Table(columns, rows, frozenset({1}))]
    if conclusion != "none":
        tone = "warn" if conclusion in CONTEXT_DOUBTS else "good"
        blocks.append(Paragraph(Message(f"smi.is.{conclusion}", dict(values or {})), tone))
    return (*blocks, *more, Paragraph(Message("smi.why_more")))


def _range(line: Line) -> Cell:
    if line.low_bytes == line.high_bytes:
        return Quantity(line.low_bytes, "bytes")
    return Quantity((line.low_bytes, line.high_bytes), "bytes_range")
