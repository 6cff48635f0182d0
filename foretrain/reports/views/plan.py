"""A plan as a Document: the verdict first, then memory, work, time, what surrounds it, notes."""

from datetime import datetime
from typing import Any

from foretrain.advice.outlook import Outlook
from foretrain.advice.record import Advices
from foretrain.config.families import family_of
from foretrain.predict.memory import PhaseMemory, StepMemory
from foretrain.predict.plan import Plan
from foretrain.predict.trace.memory import Exact
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Message,
    Only,
    Paragraph,
    Quantity,
    Section,
    Table,
)
from foretrain.reports.views import figures, plan_time
from foretrain.reports.views import memory as memory_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views.advice import section as advice_section
from foretrain.reports.views.shared import TONES, assumed


def document(
    plan: Plan, now: datetime | None = None, advice: Advices | None = None, outlook: Outlook | None = None
) -> Document:
    """The whole plan. `now`: says when the run would end if it were started then. `advice`: what to change. `outlook`:
    what surrounds the plan."""
    gpu = plan.gpu
    peak = gpu.peak_flop_per_s(plan.dtype)
    logged = plan.timing is not None and plan.timing.source.startswith("measured")
    source = Message("plan.source_logged" if logged else "plan.source_trace" if plan.exact else "plan.source")
    subtitle = Message(
        "plan.subtitle" if peak and gpu.memory_bytes else "plan.subtitle_short",
        {"gpu": gpu.name, "memory": gpu.memory_bytes or 0, "peak": peak or 0, "dtype": plan.dtype, "source": source},
    )
    whose = () if logged or plan.timing is None else (_of_step(plan),)
    pictures = tuple(Only("page", block) for block in memory_view.phase_pictures(plan))
    numbers = Only("page", figures.of_plan(plan))
    sections = [
        Section(Message("plan.verdict"), (*_verdict(plan), *assumed(plan), _of_step(plan), numbers)),
        *([advice_section(plan, advice)] if advice is not None else []),
        Section(Message("plan.memory"), (*pictures, *_memory(plan))),
        Section(Message("plan.bytes"), _bytes(plan)),
        Section(Message("plan.work"), (_work(plan),)),
        Section(Message("plan.time"), (*whose, *plan_time.blocks(plan, now))),
        *(outlook_view.sections(plan, outlook) if outlook is not None else []),
    ]
    if plan.notes:
        notes = tuple(Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes)
        sections.append(Section(Message("plan.notes"), notes))
    return Document(Message("plan.title", {"name": plan.name}), subtitle, sections)


def _of_step(plan: Plan) -> Only:
    """Whose step the figures beneath are of. In a terminal the sentences of the verdict say it."""
    return Only("page", Paragraph(Message("report.figures_of", {"step": Message(f"step.{plan.step}")})))


def _mode(memory: StepMemory) -> str:
    return "compiled" if memory.compiled else "eager"


def _verdict(plan: Plan) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for memory in plan.memories:
        verdict = plan.verdict_of(memory.step)
        exact = plan.exact_of(memory.step)
        if exact is not None:
            blocks.append(Paragraph(_exact_verdict(plan, exact, verdict), TONES[verdict]))
            expandable = exact.smallest_limit_expandable_bytes
            if verdict != "fits" and expandable < 0.98 * exact.smallest_limit_bytes:
                lives = {"lives": expandable + memory.context.expected_bytes, "step": Message(f"step.{memory.step}")}
                blocks.append(Paragraph(Message("verdict_exact.expandable", lives)))
            continue
        phase = memory.neediest
        id = f"verdict.{verdict or 'unknown'}"
        beside = ".beside" if plan.used_by_others_bytes and verdict else ".alone" if verdict else ""
        values = _verdict_values(plan, memory, phase)
        blocks.append(Paragraph(Message(id + beside, values), TONES[verdict]))
        if verdict == "fits" and phase.needed_high_bytes > values["available"]:
            blocks.append(Paragraph(Message("verdict.given_back", values)))
    return tuple(blocks)


def _verdict_values(plan: Plan, memory: StepMemory, phase: PhaseMemory) -> dict[str, Any]:
    low, expected, high = phase.needed_span
    return {
        "step": Message(f"step.{memory.step}"),
        "mode": Message(f"mode.{_mode(memory)}").text(),
        "phase": Message(f"phase.{phase.phase}"),
        "moment": Message(f"moment.{phase.moment}"),
        "low": low,
        "expected": expected,
        "high": high,
        "available": plan.available_bytes or 0,
        "others": plan.used_by_others_bytes,
    }


def _exact_verdict(plan: Plan, exact: Exact, verdict: str | None) -> Message:
    """What it takes where there is room, from how much on it lives, and where it dies under what there is."""
    memory, death = exact.memory, exact.death
    values = _verdict_values(plan, memory, memory.neediest)
    values |= {
        "lives": exact.smallest_limit_bytes + exact.memory.context.expected_bytes,
        "room": Message("room.beside" if plan.used_by_others_bytes else "room.alone", dict(values)),
    }
    if death is not None:
        values |= {
            "allowed": death.limit_bytes, "phase": Message(f"phase.{death.phase}"),
            "moment": Message(f"moment.{death.moment}"), "requested": death.requested_bytes,
            "allocated": death.allocated_bytes, "reserved": death.reserved_bytes,
        }  # fmt: skip
    return Message(f"verdict_exact.{verdict or 'unknown'}", values)


def _needs(phase: PhaseMemory, exact: bool, reached: bool) -> tuple[Cell, ...]:
    """Allocated, with a trace also reserved, needed, the range of that, the verdict."""
    reserved = (Quantity(phase.reserved_bytes, "bytes"),) if exact else ()
    low, expected, high = phase.needed_span
    return (
        Quantity(phase.allocated_bytes, "bytes"),
        *reserved,
        Quantity(expected, "bytes"),
        Quantity((low, high), "bytes_range"),
        Message("word.not_reached") if not reached else Message(f"word.{phase.verdict}") if phase.verdict else "–",
    )


def _memory(plan: Plan) -> tuple[Block, ...]:
    reserved = ("reserved",) if plan.exact else ()
    names = ("phase", "allocated", *reserved, "needed", "range", "verdict")
    heads = tuple(Message(f"column.{name}") for name in names)
    numeric = frozenset(range(1, len(names) - 1))
    blocks: list[Block] = []
    for memory in plan.memories:
        rows, tones = [], []
        for phase in memory.phases:
            reached = phase.phase not in memory.not_reached
            cells = _needs(phase, bool(plan.exact), reached)
            rows.append((Message(f"phase.{phase.phase}"), *cells))
            tones.append("plain" if phase.verdict == "fits" or not reached else TONES[phase.verdict])
        head = Message(
            "plan.step_mode",
            {"step": Message(f"step.{memory.step}"), "mode": Message(f"mode.{_mode(memory)}")},
        )
        optional = tuple(names.index(name) for name in ("reserved", "allocated") if name in names)
        blocks.append(Table((head, *heads[1:]), tuple(rows), numeric, tuple(tones), optional))
    if plan.exact:
        return *blocks, Paragraph(Message("plan.needed_explained_exact", {"torch": plan.exact[0].torch}))
    explained = "plan.needed_explained_cpu" if plan.gpu.kind == "cpu" else "plan.needed_explained"
    return *blocks, Paragraph(Message(explained))


def _bytes(plan: Plan) -> tuple[Block, ...]:
    """Both bars, then the rows of the phase that needs most of the step that is meant, each with its formula."""
    memory = plan.memory_of(plan.step)
    phase = memory.neediest
    rows: list[tuple[Cell, ...]] = [
        (Message(f"component.{c.id}"), Quantity(c.size_bytes, "bytes"), c.formula)
        for c in phase.components
        if c.size_bytes * 2000 >= phase.allocated_bytes
    ]
    rest = phase.allocated_bytes - sum(
        c.size_bytes for c in phase.components if c.size_bytes * 2000 >= phase.allocated_bytes
    )
    if rest:
        rows.append((Message("component.rest"), Quantity(rest, "bytes"), ""))
    rows.append((Message("component.total"), Quantity(phase.allocated_bytes, "bytes"), ""))
    columns = (Message("column.component"), Message("column.bytes"), Message("column.formula"))
    c, evaluates = plan.config, phase.phase.startswith("evaluate")
    batch, context = (c.eval_batch, c.eval_block) if evaluates else (c.batch_size, c.block_size)
    legend = Message(
        "plan.legend",
        {
            "B": batch, "T": context, "C": c.n_embd, "H": c.n_head, "L": c.n_layer, "V": c.vocab_size,
            "P": plan.counts.n_params,
        },
    )  # fmt: skip
    where = Message(
        "plan.where",
        {
            "step": Message(f"step.{plan.step}"),
            "phase": Message(f"phase.{phase.phase}"),
            "moment": Message(f"moment.{phase.moment}"),
        },
    )
    family = family_of(c)
    own = {letter: getattr(c, name) for name, letter in family.letters.items()}
    legends = [Paragraph(legend), *([Paragraph(Message(family.legend, own))] if own else [])]
    return memory_view.memory_bars(plan), Paragraph(where), Table(columns, tuple(rows), frozenset({1})), *legends


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
    """How many batches are evaluated, and of how many tokens."""
    c = plan.config.as_nanogpt() if plan.step == "nanogpt" else plan.config
    batches = plan.evaluation_batches
    values = {
        "batches": batches, "batch_size": c.eval_batch, "block_size": c.eval_block,
        "tokens": 2 * c.eval_rows * c.eval_block,
    }  # fmt: skip
    return Message("row.evaluation"), Message("value.evaluation_work", values)
