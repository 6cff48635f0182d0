"""The whole fine-tuning plan: each phase, where the memory goes, what to change, notes."""

from typing import Any

from foretrain.advice.record import Advice
from foretrain.base.messages import has
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import PhaseMemory
from foretrain.reports.document import (
    Bar,
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
from foretrain.reports.views.finetune import takes
from foretrain.reports.views.finetune.screen import change_text, component, title, verdict_of
from foretrain.reports.views.shared import TONES, card_memory, grouped, taken_bytes, verdict_word


def document(plan: FineTunePlan, changes: tuple[Advice, ...]) -> Document:
    """The whole plan, from the verdict on."""
    lead = Section(Message("finetune.verdict"), (verdict_of(plan), *card_memory(plan.gpu)))
    where = Message("finetune.subtitle", {"where": plan.where})
    return Document(title(plan), where, [lead, *sections(plan, changes)])


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
    where = Message("finetune.components", {"phase": Message(f"finetune.phase.{plan.memory.neediest.phase}")})
    sections = [takes.section(plan, *more), phases, Section(where, (Table(names, parts, frozenset({1})),))]
    if changes:
        listed_changes = tuple(Paragraph(Message("first.said", {"text": change_text(each)})) for each in changes)
        sections.append(Section(Message("finetune.changes"), listed_changes))
    notes = [Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes if has(f"note.{note.id}")]
    if plan.timing is not None and plan.timing.source == "estimated":
        notes.append(Paragraph(Message("finetune.speed_from", {"gpu": plan.gpu.name})))
    if notes:
        sections.append(Section(Message("finetune.notes"), tuple(notes)))
    return sections


def phase_bars(plan: FineTunePlan) -> StackedBars:
    """A bar for each phase up to what the process is expected to need."""
    bars = tuple(
        Bar(
            Message(f"finetune.phase.{phase.phase}"),
            (*grouped(phase.components), ("overhead", max(0, phase.needed_expected_bytes - phase.allocated_bytes))),
        )
        for phase in plan.memory.phases
    )
    return StackedBars(Message("finetune.phases"), bars, plan.available_bytes)


def _phase(phase: PhaseMemory, available_bytes: int | None) -> tuple[Any, ...]:
    needed = taken_bytes(phase.needed_expected_bytes, phase.verdict, available_bytes)
    return (
        Message(f"finetune.phase.{phase.phase}"), Quantity(phase.allocated_bytes, "bytes"),
        Quantity(phase.reserved_bytes, "bytes"), Quantity(needed, "bytes"),
        verdict_word(phase.verdict),
    )  # fmt: skip
