"""The whole fine-tuning plan: each phase, where the memory goes, what to change, notes."""

from dataclasses import replace
from functools import partial
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.record import Advice
from foretrain.analysis.finetune_memory import ExplainedPhase, FineTuneExplanation, LargeTensor
from foretrain.base.messages import has, listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import PhaseMemory
from foretrain.predict.timing import Timing
from foretrain.reports.document import (
    Bar,
    Block,
    Cell,
    Document,
    Message,
    Only,
    Paragraph,
    Quantity,
    Section,
    StackedBars,
    Table,
)
from foretrain.reports.views.advice import change_text
from foretrain.reports.views.explain import nvidia_smi, sums_table
from foretrain.reports.views.finetune.screen import (
    batch_rows,
    component,
    time_unknown,
    trained_text,
)
from foretrain.reports.views.lead import lead_of, title
from foretrain.reports.views.plan import duration, spending_rows
from foretrain.reports.views.shared import TONES, card_memory, grouped, taken_bytes, verdict_word


def document(plan: FineTunePlan, changes: tuple[Advice, ...]) -> Document:
    """The whole plan, from the verdict on."""
    lead = Section(Message("finetune.verdict"), (*lead_of(plan), *card_memory(plan.gpu)))
    where = Message("finetune.subtitle", {"where": plan.where})
    return Document(title(plan, Asked()), where, [lead, *sections(plan, changes)])


def sections(
    plan: FineTunePlan, changes: tuple[Advice, ...] = (), more: tuple[tuple[Cell, ...], ...] = ()
) -> list[Section]:
    """What it takes, each phase, the components of the worst one with their formulas, all changes, all notes. `more`:
    rows of what it takes."""
    heads = ("finetune_phase", "finetune_allocated", "finetune_reserved", "finetune_needed", "finetune_verdict")
    columns = tuple(Message(f"column.{name}") for name in heads)
    rows = tuple(_phase(phase, plan.available_bytes) for phase in plan.memory.phases)
    tones = tuple(TONES[phase.verdict] for phase in plan.memory.phases)
    table = Table(columns, rows, frozenset({1, 2, 3}), tones)
    phases = Section(Message("finetune.phases"), (table, Only("page", phase_bars(plan))))
    parts = tuple(
        (component(plan, row.id), Quantity(row.size_bytes, "bytes"), row.formula)
        for row in plan.memory.neediest.components
    )
    names = tuple(Message(f"column.{name}") for name in ("finetune_component", "finetune_bytes", "finetune_formula"))
    where = Message("finetune.components", {"phase": Message(f"phase.{plan.memory.neediest.phase}")})
    sections = [section(plan, *more), phases, Section(where, (Table(names, parts, frozenset({1})),))]
    if changes:
        listed_changes = tuple(Paragraph(Message("first.said", {"text": change_text(plan, each)})) for each in changes)
        sections.append(Section(Message("finetune.changes"), listed_changes))
    notes = [Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes if has(f"note.{note.id}")]
    if plan.timing is not None and plan.timing.source == "estimated":
        notes.append(Paragraph(Message("finetune.speed_from", {"gpu": plan.gpu.name})))
    if notes:
        sections.append(Section(Message("finetune.notes"), tuple(notes)))
    return sections


def phase_bars(plan: FineTunePlan) -> StackedBars:
    bars = tuple(
        Bar(
            Message(f"phase.{phase.phase}"),
            (*grouped(phase.components), ("overhead", max(0, phase.needed_expected_bytes - phase.allocated_bytes))),
        )
        for phase in plan.memory.phases
    )
    return StackedBars(Message("finetune.phases"), bars, plan.available_bytes)


def _phase(phase: PhaseMemory, available_bytes: int | None) -> tuple[Any, ...]:
    needed = taken_bytes(phase.needed_expected_bytes, phase.verdict, available_bytes)
    return (
        Message(f"phase.{phase.phase}"), Quantity(phase.allocated_bytes, "bytes"),
        Quantity(phase.reserved_bytes, "bytes"), Quantity(needed, "bytes"),
        verdict_word(phase.verdict),
    )  # fmt: skip


def sizes(plan: FineTunePlan) -> Message:
    facts = plan.facts
    if facts is None:
        return Message("finetune.sizes_traced", {"family": str((plan.config or {}).get("model_type"))})
    values = {
        "layers": facts.n_layer, "width": facts.n_embd, "heads": facts.n_head, "kv_heads": facts.n_kv_head,
        "mlp": facts.mlp_width, "vocabulary": facts.vocab_size, "dtype": facts.dtype, "family": facts.model_type,
    }  # fmt: skip
    return Message("finetune.sizes", values)


def bars(plan: FineTunePlan) -> StackedBars:
    memory = plan.memory
    card = plan.gpu.memory_bytes if plan.gpu.memory_bytes != plan.available_bytes else None
    context = Message(f"context_from.{memory.context.source}")
    source = Message("report.source_phases", {"source": memory.source, "context": context})
    return replace(phase_bars(plan), title=Message("picture.phases"), card_bytes=card, source=source)


def section(plan: FineTunePlan, *more: tuple[Cell, ...]) -> Section:
    """All that the first screen has of it, with ranges. `more`: rows that come first."""
    rows = [*more, *((row.label, row.text) for row in batch_rows(plan))]
    rows.append((Message("finetune.label.trains"), trained_text(plan)))
    if plan.timing is None:
        unknown = Paragraph(Message("first.said", {"text": time_unknown(plan)}))
        return Section(Message("finetune.takes"), (Table((), tuple(rows)), unknown))
    rows += _time_rows(plan.timing)
    if plan.timing.total_s is None:
        return Section(Message("finetune.takes"), (Table((), tuple(rows)), Paragraph(Message("finetune.no_length"))))
    rows += spending_rows(plan.timing.prices, plan.gpu, plan.timing, plan.tune.world)
    return Section(Message("finetune.takes"), (Table((), tuple(rows)), Paragraph(Message("source.power"))))


def _time_rows(timing: Timing) -> list[tuple[Cell, ...]]:
    step, total = timing.step_s, timing.total_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), duration(step.low_s, step.expected_s, step.high_s)),
        (Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})),
        (Message("row.mfu"), _share("finetune.mfu_flops", timing.flops_per_step, timing.mfu)),
        (Message("row.hfu"), _share("finetune.hfu_flops", timing.hardware_flops_per_step, timing.hfu)),
    ]
    if total is not None and timing.steps is not None:
        heading = Message("row.all_steps", {"steps": timing.steps})
        rows.append((heading, duration(total.low_s, total.expected_s, total.high_s)))
    return rows


def _share(id: str, counted: int | None, share: float | None) -> str:
    said = [Message(id, {"flops": counted}).text()]
    return listed([Quantity(share, "percent").text(), *said] if share is not None else said)


MOST_TENSORS = 12
MOST_NAMES = 3  # of weights of one size


def explain_document(plan: FineTunePlan, found: FineTuneExplanation) -> Document:
    worst = next(phase for phase in found.phases if phase.phase == found.phase)
    others = [phase for phase in found.phases if phase is not worst]
    letters = (Paragraph(Message("finetune.letters")),) if found.source == "estimated" else ()
    sections = [
        Section(Message("finetune.verdict"), (*lead_of(plan), *letters)),
        *(_explain_phase(plan, phase) for phase in (worst, *others)),
    ]
    if found.lines:
        sections.append(Section(Message("explain.smi"), nvidia_smi(found.lines, found.conclusion)))
    return Document(title(plan, Asked()), Message("finetune.subtitle", {"where": plan.where}), sections)


def _explain_phase(plan: FineTunePlan, phase: ExplainedPhase) -> Section:
    heading = Message("finetune.explained", {
        "phase": Message(f"phase.{phase.phase}"), "allocated": phase.allocated_bytes,
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
