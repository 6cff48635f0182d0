"""Where the memory of a fine-tuning run goes: every byte of each phase, the largest tensors first, and nvidia-smi."""

from functools import partial

from foretrain.analysis.finetune_memory import ExplainedPhase, FineTuneExplanation, LargeTensor
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.explain import nvidia_smi, sums_table
from foretrain.reports.views.finetune.screen import component, title, verdict_of

MOST_TENSORS = 12
MOST_NAMES = 3  # of weights of one size


def document(plan: FineTunePlan, found: FineTuneExplanation) -> Document:
    """Why the run needs what it needs: the phase that needs most, then the others, then what nvidia-smi shows."""
    worst = next(phase for phase in found.phases if phase.phase == found.phase)
    others = [phase for phase in found.phases if phase is not worst]
    letters = (Paragraph(Message("finetune.letters")),) if found.source == "estimated" else ()
    sections = [
        Section(Message("finetune.verdict"), (verdict_of(plan), *letters)),
        *(_phase(plan, phase) for phase in (worst, *others)),
    ]
    if found.lines:
        sections.append(Section(Message("explain.smi"), nvidia_smi(found.lines, found.conclusion)))
    return Document(title(plan), Message("finetune.subtitle", {"where": plan.where}), sections)


def _phase(plan: FineTunePlan, phase: ExplainedPhase) -> Section:
    heading = Message("finetune.explained", {
        "phase": Message(f"finetune.phase.{phase.phase}"), "allocated": phase.allocated_bytes,
    })  # fmt: skip
    return Section(heading, (sums_table(phase.sums, partial(component, plan)), *_tensors(plan, phase.tensors)))


def _tensors(plan: FineTunePlan, tensors: tuple[LargeTensor, ...]) -> tuple[Block, ...]:
    if not tensors:
        return ()
    columns = tuple(Message(f"column.{name}") for name in ("bytes", "count", "tensor", "where"))
    rows = tuple(_row(plan, tensor) for tensor in tensors[:MOST_TENSORS])
    return (Table(columns, rows, frozenset({0, 1})),)


def _row(plan: FineTunePlan, tensor: LargeTensor) -> tuple[Cell, ...]:
    names = tensor.where.split(", ")
    where: Cell = component(plan, tensor.component)
    if tensor.where:
        values = {"names": ", ".join(names[:MOST_NAMES]), "more": len(names) - MOST_NAMES, "component": where}
        where = Message("finetune.of_weights_more" if len(names) > MOST_NAMES else "finetune.of_weights", values)
    return Quantity(tensor.size_bytes, "bytes"), f"{tensor.count:,}", tensor.what, where
