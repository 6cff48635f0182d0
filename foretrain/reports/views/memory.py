"""Pictures of memory: what each phase needs against what there is, and one step from moment to moment."""

from dataclasses import replace
from typing import TYPE_CHECKING

from foretrain.base.messages import listed
from foretrain.predict.memory import Component, PhaseMemory, StepMemory
from foretrain.predict.plan import Plan
from foretrain.predict.step_moments import MomentMemory, StepMoments
from foretrain.reports.document import Bar, Block, Level, Message, Moment, Moments, Paragraph, Quantity, StackedBars
from foretrain.reports.views.shared import TONES

if TYPE_CHECKING:  # in a browser there is no training
    from foretrain.training.store import MeasuredMemory

Parts = tuple[tuple[str, int], ...]
# Components are shown in these groups, so that a bar has a handful of colours; order is from the bottom of a bar.
GROUPS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "checkpoint": "weights",
    "weight_copies": "weight_copies", "activations.residual": "activations", "activations.norm": "activations",
    "activations.attention": "activations", "activations.mlp": "activations", "activations.dropout": "activations",
    "activations.head": "activations",
    "logits": "logits", "temporaries": "temporaries", "workspace": "temporaries",
    "measuring": "temporaries", "batch": "temporaries",
    "overhead": "overhead", "activations": "activations", "buffers": "weights", "rounding": "temporaries",
}  # fmt: skip
GROUP_ORDER = (
    "weights", "gradients", "optimizer", "weight_copies", "activations", "logits", "temporaries", "overhead"
)  # fmt: skip


def grouped(components: tuple[Component, ...]) -> tuple[tuple[str, int], ...]:
    """(group, bytes) in the order of GROUP_ORDER."""
    sums: dict[str, int] = dict.fromkeys(GROUP_ORDER, 0)
    for component in components:
        sums[GROUPS[component.id]] += component.size_bytes
    return tuple((group, size) for group, size in sums.items() if size)


def phase_parts(plan: Plan, memory: StepMemory, phase: PhaseMemory) -> tuple[tuple[str, int], ...]:
    """A phase up to what it is expected to need: by group, then what the process needs besides, and last what the
    allocator keeps from earlier phases: an evaluation between steps does not need that itself."""
    above = max(0, phase.needed_expected_bytes - phase.allocated_bytes)
    if plan.gpu.kind == "cpu":
        return *grouped(phase.components), ("python", above)
    own = max(0, memory.worst.needed_expected_bytes - memory.worst.allocated_bytes)
    kept = max(0, above - own) if phase.phase.startswith("evaluate") else 0
    parts = (*grouped(phase.components), ("overhead", above - kept))
    return (*parts, ("kept", kept)) if kept else parts


def memory_bars(plan: Plan) -> StackedBars:
    """One bar for each way to run the step, at the phase that needs most, up to what it is expected to need."""
    bars = tuple(
        Bar(Message(f"step.{each.step}"), phase_parts(plan, each, each.neediest))
        for each in sorted(plan.memories, key=plan.memory.index)
    )
    return StackedBars(Message("picture.memory"), bars, plan.available_bytes)


def phase_bars(plan: Plan, memory: StepMemory, measured: "MeasuredMemory | None" = None) -> StackedBars:
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


def phase_pictures(plan: Plan) -> tuple[Block, ...]:
    """A bar for each phase, of both ways to run the step; of the one that is meant, where it does not fit in words."""
    blocks: list[Block] = []
    for memory in plan.memories:
        mode = Message("mode.compiled" if memory.compiled else "mode.eager")
        title = Message("report.bars_of", {"step": Message(f"step.{memory.step}"), "mode": mode})
        blocks.append(replace(phase_bars(plan, memory), title=title))
        blocks += verdicts(plan, memory) if memory.step == plan.step else ()
    return tuple(blocks)


def verdicts(plan: Plan, memory: StepMemory) -> tuple[Block, ...]:
    """Where a phase does not fit, in words."""
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
        if phase.verdict in ("tight", "does_not_fit")
    )  # fmt: skip


def moments_picture(plan: Plan, moments: StepMoments) -> tuple[Block, ...]:
    """The step, and in words where it is highest."""
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
    """(group, bytes) of a moment."""
    sums: dict[str, int] = {}
    for component, size in moment.components_bytes.items():
        group = GROUPS[component]
        sums[group] = sums.get(group, 0) + size
    return tuple((group, size) for group, size in sums.items() if size > 0)
