"""A plan as a Document: the verdict first, then memory, work, time, what surrounds it, notes."""

from datetime import datetime

from foretrain.advice.outlook import Outlook
from foretrain.advice.record import Advices
from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Cell, Document, Message, Only, Paragraph, Section, Table
from foretrain.reports.views import memory as memory_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views.advice import section as advice_section
from foretrain.reports.views.shared import Page, assumed, card_memory
from foretrain.reports.views.takes import no_time, of_plan, speed_source, time_rows


def document(
    plan: Plan, advice: Advices | None = None, now: datetime | None = None, outlook: Outlook | None = None
) -> Document:
    """Return the whole plan. `now`: says when the run would end. `outlook`: what other ways and cards would give."""
    gpu = plan.gpu
    peak = gpu.peak_flop_per_s(plan.dtype)
    logged = plan.timing is not None and plan.timing.source.startswith("measured")
    source = Message("plan.source_logged" if logged else "plan.source_trace" if plan.exact else "plan.source")
    subtitle = Message(
        "plan.subtitle" if peak and gpu.memory_bytes else "plan.subtitle_short",
        {"gpu": gpu.name, "memory": gpu.memory_bytes or 0, "peak": peak or 0, "dtype": plan.dtype, "source": source},
    )
    whose = () if logged or plan.timing is None else (_of_step(plan),)
    pictures = tuple(Only("page", block) for block in _pictures(plan))
    numbers = Only("page", of_plan(plan))
    sections = [
        Section(
            Message("plan.verdict"),
            (*memory_view.sentences(plan), *card_memory(gpu), *assumed(plan), _of_step(plan), numbers),
        ),
        *([advice_section(plan, advice)] if advice is not None else []),
        Section(Message("plan.memory"), (*pictures, *memory_view.tables(plan))),
        Section(Message("plan.bytes"), memory_view.every_byte(plan)),
        Section(Message("plan.work"), (_work(plan),)),
        Section(Message("plan.time"), (*whose, *blocks(plan, now))),
        *(outlook_view.sections(plan, outlook) if outlook is not None else []),
    ]
    if plan.notes:
        notes = tuple(Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes)
        sections.append(Section(Message("plan.notes"), notes))
    return Document(Message("plan.title", {"name": plan.name}), subtitle, sections)


def page(plan: Plan) -> Page:
    made = document(plan)
    needs = [(memory_view.step_mode(each), each, each.verdict) for each in plan.memories]
    return Page(made, needs, (made.subtitle,), of_plan(plan), memory_view.phase_pictures(plan))


def _pictures(plan: Plan) -> list[Block]:
    blocks: list[Block] = []
    for picture, memory in zip(memory_view.phase_pictures(plan), plan.memories, strict=True):
        blocks += [picture, *(memory_view.verdicts(plan, memory) if memory.step == plan.step else ())]
    return blocks


def _of_step(plan: Plan) -> Only:
    return Only("page", Paragraph(Message("report.figures_of", {"step": Message(f"step.{plan.step}")})))


def _work(plan: Plan) -> Table:
    counts, work = plan.counts, plan.work
    rows: list[tuple[Cell, ...]] = [
        (Message("row.parameters"), Message("value.parameters", counts.model_dump())),
        (Message("row.optimizer_groups"), Message("value.optimizer_groups", counts.model_dump())),
    ]
    if plan.config.eval_only:
        return Table((), (rows[0], _evaluation_work_row(plan)))
    rows += [
        (Message("row.tokens_per_step"), Message("value.tokens_per_step", {
            "tokens": work.tokens_per_step, "batch_size": plan.config.batch_size,
            "accumulation": plan.config.gradient_accumulation_steps, "block_size": plan.config.block_size})),
        (Message("row.tokens"), Message("value.tokens", {"tokens": work.tokens, "steps": work.steps})),
    ]  # fmt: skip
    if work.epochs is not None:
        values = {"epochs": work.epochs, "tokens": work.dataset_tokens}
        rows.append((Message("row.epochs"), Message("value.epochs", values)))
    rows.append((Message("row.flops"), Message("value.flops", {"flops_6n": work.flops_6n, "flops": work.flops})))
    return Table((), tuple(rows))


def _evaluation_work_row(plan: Plan) -> tuple[Cell, ...]:
    c = plan.config.as_nanogpt() if plan.step == "nanogpt" else plan.config
    batches = plan.evaluation_batches
    values = {
        "batches": batches, "batch_size": c.eval_batch, "block_size": c.eval_block,
        "tokens": 2 * c.eval_rows * c.eval_block,
    }  # fmt: skip
    return Message("row.evaluation"), Message("value.evaluation_work", values)


def blocks(plan: Plan, now: datetime | None) -> tuple[Block, ...]:
    timing = plan.timing
    if timing is None:
        return (Paragraph(no_time(plan, "plan")),)
    return Table((), tuple(time_rows(plan, timing, now))), Paragraph(speed_source(plan, timing))
