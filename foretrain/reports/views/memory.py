"""Pictures of memory: what each phase needs against what there is, and one step from moment to moment."""

from typing import TYPE_CHECKING

from foretrain.base.messages import listed
from foretrain.predict.memory import StepMemory
from foretrain.predict.plan import Plan
from foretrain.predict.step_moments import MomentMemory, StepMoments
from foretrain.reports.document import Bar, Block, Level, Message, Moment, Moments, Paragraph, Quantity, StackedBars
from foretrain.reports.views.plan import GROUPS, TONES, phase_parts

if TYPE_CHECKING:  # in a browser there is no training
    from foretrain.training.store import MeasuredMemory

Parts = tuple[tuple[str, int], ...]


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
