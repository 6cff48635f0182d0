"""The report of a plan as a Document: the verdict, the figures, what to change, then pictures of everything."""

from datetime import datetime

from foretrain.advise.advice import Advices
from foretrain.advise.outlook import Outlook
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan
from foretrain.report import outlook_view, plan_view
from foretrain.report.document import Block, Cell, Document, Figure, Figures, Message, Paragraph, Quantity, Section
from foretrain.report.memory_view import phase_bars, verdicts


def document(plan: Plan, found: Outlook, now: datetime | None = None, advice: Advices | None = None) -> Document:
    """The plan's own document with pictures, and what surrounds the plan."""
    whole = plan_view.document(plan, now, advice)
    sections = []
    for section in whole.sections:
        if section.title.id == "plan.verdict":
            ordered = sorted(section.blocks, key=lambda block: not _of_step(block, found.step))
            section = Section(section.title, (*ordered, _of(found.step), figures(plan, found.step)))
        elif section.title.id == "plan.memory":
            section = Section(section.title, (*memory_pictures(plan, found.step), *section.blocks))
        elif section.title.id == "plan.time" and plan.timing and plan.timing.source != "measured (log)":
            section = Section(section.title, (_of(plan.step), *section.blocks))  # whichever the figures above are of
        elif section.title.id == "plan.notes":
            continue
        sections.append(section)
    sections += outlook_view.sections(plan, found)
    sections += [section for section in whole.sections if section.title.id == "plan.notes"]
    return Document(Message("report.plan_title", {"name": plan.name}), whole.subtitle, sections)


def _of(step: StepName) -> Paragraph:
    return Paragraph(Message("report.figures_of", {"step": Message(f"step.{step}")}))


def _of_step(block: Block, step: StepName) -> bool:
    """Whether a verdict is of this way to run the step; it comes first."""
    if not isinstance(block, Paragraph):
        return False
    said = block.message.values.get("step")
    return isinstance(said, Message) and said.id == f"step.{step}"


def memory_pictures(plan: Plan, first: StepName) -> tuple[Block, ...]:
    """A bar for each phase, of both ways to run the step, the one that is asked about first."""
    blocks: list[Block] = []
    for memory in sorted(plan.memory, key=lambda memory: memory.step != first):
        mode = Message("mode.compiled" if memory.compiled else "mode.eager")
        head = Message("report.bars_of", {"step": Message(f"step.{memory.step}"), "mode": mode})
        bars = phase_bars(plan, memory)
        blocks += [type(bars)(head, bars.bars, bars.limit_bytes, bars.card_bytes, bars.source)]
        blocks += verdicts(plan, memory) if memory.step == first else ()
    return tuple(blocks)


def figures(plan: Plan, step: StepName) -> Figures:
    """What people look at first, each with its source."""
    memory = plan.memory_of(step)
    timing = plan.timing_of(step)
    needed = Quantity(memory.needed_bytes, "bytes")
    found: list[tuple[str, Cell | None, str]] = [("memory_needed", needed, memory.source)]
    if plan.available_bytes is not None:
        found.append(("available", Quantity(plan.available_bytes, "bytes"), plan.gpu.name))
    if timing is not None:
        money = timing.money()
        amount = {"amount": money[1], "currency": plan.config.currency} if money else {}
        found += [
            ("step", Quantity(timing.step_s.expected_s, "duration") if plan.work.steps else None, timing.source),
            ("wall", Quantity(timing.total_s.expected_s, "duration"), timing.source),
            ("speed", f"{timing.tokens_per_s:,.0f}" if plan.work.steps else None, timing.source),
            ("mfu", Quantity(timing.mfu, "percent") if timing.mfu and plan.work.steps else None, timing.source),
            ("energy", Quantity(joules, "energy") if (joules := timing.energy_expected_j) else None, timing.source),
            ("cost", Message("value.amount", amount) if money else None, timing.source),
        ]
    found.append(("tokens", Quantity(plan.work.tokens, "count") if plan.work.tokens else None, "config"))
    items = (Figure(Message(f"figure.{id}"), value, source) for id, value, source in found if value is not None)
    return Figures(tuple(items))
