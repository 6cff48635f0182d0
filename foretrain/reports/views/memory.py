"""The memory of a plan: whether it fits, what each phase needs, every byte of the highest, and pictures of all that."""

from dataclasses import replace
from typing import TYPE_CHECKING

from foretrain.base.messages import listed
from foretrain.config.families import family_of
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import PhaseMemory, RunMemory
from foretrain.predict.plan import Plan
from foretrain.predict.step_moments import MomentMemory, StepMoments
from foretrain.reports.document import (
    Bar,
    Block,
    Level,
    Message,
    Moment,
    Moments,
    Paragraph,
    Quantity,
    StackedBars,
    Table,
)
from foretrain.reports.views.explain import sums_table
from foretrain.reports.views.lead import lead_of
from foretrain.reports.views.shared import GROUPS, TONES, grouped, verdict_word

if TYPE_CHECKING:  # in a browser there is no training
    from foretrain.runs.record import MeasuredMemory

Parts = tuple[tuple[str, int], ...]


def _mode(memory: RunMemory) -> str:
    return "compiled" if memory.compiled else "eager"


def sentences(plan: Plan) -> tuple[Block, ...]:
    """Return the verdict of each trainer's step."""
    blocks: list[Block] = []
    for memory in plan.memories:
        lead, exact = lead_of(plan.model_copy(update={"step": memory.step}))[0], plan.exact_of(memory.step)
        verdict_line = Message("plan.verdict_of", {"step": step_mode(memory), "verdict": lead.message})
        blocks.append(replace(lead, message=verdict_line))
        expandable = exact.smallest_limit_expandable_bytes if exact else 0
        if exact is not None and memory.verdict != "fits" and expandable < 0.98 * exact.smallest_limit_bytes:
            lives = {"lives": expandable + memory.context.expected_bytes, "step": Message(f"step.{memory.step}")}
            blocks.append(Paragraph(Message("plan.expandable", lives)))
    return tuple(blocks)


def phase_table(memory: RunMemory, head: Message, *, reserved: bool) -> Table:
    """What each phase of a run of any kind needs. `reserved`: with what the allocator holds."""
    names = ("phase", "allocated", *(("reserved",) if reserved else ()), "needed", "range", "verdict")
    rows, tones = [], []
    for phase in memory.phases:
        reached, (low, expected, high) = phase.phase not in memory.not_reached, phase.needed_span
        held = (Quantity(phase.reserved_bytes, "bytes"),) if reserved else ()
        rows.append((
            Message(f"phase.{phase.phase}"), Quantity(phase.allocated_bytes, "bytes"), *held,
            Quantity(expected, "bytes"), Quantity((low, high), "bytes_range"),
            verdict_word(phase.verdict) if reached else Message("word.not_reached"),
        ))  # fmt: skip
        tones.append("plain" if phase.verdict == "fits" or not reached else TONES[phase.verdict])
    heads = (head, *(Message(f"column.{name}") for name in names[1:]))
    optional = tuple(names.index(name) for name in ("reserved", "allocated") if name in names)
    return Table(heads, tuple(rows), frozenset(range(1, len(names) - 1)), tuple(tones), optional)


def tables(plan: Plan) -> tuple[Block, ...]:
    blocks = [phase_table(memory, step_mode(memory), reserved=bool(plan.exact)) for memory in plan.memories]
    if plan.gpu.kind == "cpu":
        return *blocks, Paragraph(Message("plan.needed_explained_cpu"))
    context = plan.memory_of(plan.step).context
    values: dict[str, object] = {"low": context.low_bytes, "high": context.high_bytes}
    if plan.exact:
        return *blocks, Paragraph(Message("plan.needed_explained_exact", {**values, "torch": plan.exact[0].torch}))
    return *blocks, Paragraph(Message("plan.needed_explained", values))


def every_byte(plan: Plan) -> tuple[Block, ...]:
    memory = plan.memory_of(plan.step)
    phase = memory.neediest
    c, evaluates = plan.config, phase.phase.startswith("evaluate")
    batch, context = (c.eval_batch, c.eval_block) if evaluates else (c.batch_size, c.block_size)
    sizes = {
        "B": batch, "T": context, "C": c.n_embd, "H": c.n_head, "L": c.n_layer, "V": c.vocab_size,
        "P": plan.counts.n_params,
    }  # fmt: skip
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
    legends = [Paragraph(Message("plan.legend", sizes)), *([Paragraph(Message(family.legend, own))] if own else [])]
    return memory_bars(plan), Paragraph(where), sums_table(phase.components), *legends


# -- pictures -----------------------------------------------------------------------------------------------


def phase_parts(plan: Plan | FineTunePlan, memory: RunMemory, phase: PhaseMemory) -> tuple[tuple[str, int], ...]:
    """Return a phase up to its need: by group, then outside the allocator, and what that keeps of earlier phases."""
    above = max(0, phase.needed_expected_bytes - phase.allocated_bytes)
    if plan.gpu.kind == "cpu":
        return *grouped(phase.components), ("python", above)
    own = max(0, memory.worst.needed_expected_bytes - memory.worst.allocated_bytes)
    kept = max(0, above - own) if phase.phase.startswith("evaluate") else 0
    parts = (*grouped(phase.components), ("overhead", above - kept))
    return (*parts, ("kept", kept)) if kept else parts


def memory_bars(plan: Plan) -> StackedBars:
    bars = tuple(
        Bar(Message(f"step.{each.step}"), phase_parts(plan, each, each.neediest))
        for each in sorted(plan.memories, key=plan.memory.index)
    )
    return StackedBars(Message("picture.memory"), bars, plan.available_bytes)


def phase_bars(plan: Plan | FineTunePlan, memory: RunMemory, measured: "MeasuredMemory | None" = None) -> StackedBars:
    """A bar for each phase up to what the process is expected to need; beneath it what was measured, where it was."""
    bars = []
    for phase in memory.phases:
        bars.append(Bar(Message(f"phase.{phase.phase}"), phase_parts(plan, memory, phase)))
        seen = measured.phase(phase.phase) if measured else None
        if measured is not None and seen is not None and seen.allocated_bytes:
            top = seen.reserved_bytes or seen.process_bytes or seen.allocated_bytes
            label = Message("report.measured_phase", {"phase": Message(f"phase.{phase.phase}")})
            bars.append(Bar(label, _measured(measured, seen.allocated_bytes, top)))
    card = plan.gpu.memory_bytes if plan.gpu.memory_bytes != plan.available_bytes else None
    source = {"source": memory.source, "context": Message(f"context_from.{memory.context.source}")}
    return StackedBars(
        Message("picture.phases"), tuple(bars), plan.available_bytes, card,
        Message("report.source_phases_measured" if len(bars) > len(memory.phases) else "report.source_phases", source),
    )  # fmt: skip


def _measured(memory: "MeasuredMemory", allocated: int, top: int) -> Parts:
    known = (("weights", memory.weights_bytes or 0), ("optimizer", memory.optimizer_bytes or 0))
    rest = max(0, allocated - sum(size for _, size in known))
    return (*known, ("everything_else", rest), ("overhead", max(0, top - allocated)))


def phase_pictures(plan: Plan) -> tuple[StackedBars, ...]:
    most = max(phase.needed_expected_bytes for memory in plan.memories for phase in memory.phases)
    return tuple(
        replace(phase_bars(plan, memory), title=Message("report.bars_of", {"of": step_mode(memory)}), scale_bytes=most)
        for memory in plan.memories
    )


def step_mode(memory: RunMemory) -> Message:
    values = {"step": Message(f"step.{memory.step}"), "mode": Message(f"mode.{_mode(memory)}")}
    return Message("plan.step_mode", values)


def verdicts(plan: Plan, memory: RunMemory) -> tuple[Block, ...]:
    if plan.available_bytes is None:
        return ()
    return tuple(
        Paragraph(
            Message(
                "report.phase_verdict",
                {
                    "phase": Message(f"phase.{phase.phase}"), "needed": phase.needed_expected_bytes,
                    "available": plan.available_bytes, "word": Message(f"word.{phase.verdict}"),
                },
            ),
            TONES[phase.verdict],
        )
        for phase in memory.phases
        if phase.verdict not in ("fits", None)
    )  # fmt: skip


def moments_picture(plan: Plan, moments: StepMoments) -> tuple[Block, ...]:
    memory = plan.memory_of(moments.step)
    steady = next((phase for phase in memory.phases if phase.phase == "steady_step"), None)
    levels: tuple[Level, ...] = ()
    if steady is not None and plan.available_bytes is not None:
        room = plan.available_bytes - max(0, steady.needed_expected_bytes - steady.allocated_bytes)
        highest = moments.peak.total_bytes
        if 0 < room < 3 * highest:  # farther away it would only make the picture flat
            levels = (Level(Message("axis.room"), room),)
    values = {"moment": Message(f"moment.{moments.peak.moment}"), "size": moments.peak.total_bytes}
    parts = sorted(grouped_sizes(moments.peak), key=lambda part: -part[1])[:3]
    shares = listed(f"{Message(f'group.{group}').text()} {Quantity(size, 'bytes').text()}" for group, size in parts)
    values |= {"parts": shares}
    micro = plan.config.gradient_accumulation_steps
    source = {"source": moments.source, "events": moments.events, "shown": moments.micro_batches, "micro": micro}
    id = "report.source_moments_some" if micro > moments.micro_batches else "report.source_moments"
    picture = Moments(
        Message("picture.moments"), tuple(_moment(moment) for moment in moments.moments), levels, Message(id, source)
    )
    return Paragraph(Message("report.highest_moment", values)), picture


def _moment(moment: MomentMemory) -> Moment:
    part = moment.moment.partition(".")[0]
    part = part if part in ("forward", "backward", "optimizer") else "forward"
    return Moment(Message(f"moment.{moment.moment or 'build'}"), Message(f"part.{part}"), grouped_sizes(moment))


def grouped_sizes(moment: MomentMemory) -> Parts:
    sums: dict[str, int] = {}
    for component, size in moment.components_bytes.items():
        group = GROUPS[component]
        sums[group] = sums.get(group, 0) + size
    return tuple((group, size) for group, size in sums.items() if size > 0)
