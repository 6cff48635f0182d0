"""What the plan beside a run expects of it, for what the trainer and its trackers want to know."""

from foretrain.base.safe_read import read_text
from foretrain.predict.plan import Plan
from foretrain.training.store import RunDirectory


def forecast(directory: RunDirectory, world: int) -> Plan | None:
    """The plan; None where there is none to be read, or it is of another number of ranks."""
    try:
        plan = Plan.from_json(read_text(directory.path / "plan.json"))
    except (OSError, ValueError, RecursionError):  # a ValidationError is a ValueError
        return None
    return plan if plan.world == world else None


def expected_times(plan: Plan | None) -> tuple[float, float] | None:
    """Seconds of a step and of an evaluation; None where no time is forecast."""
    if plan is None or (timing := plan.timing) is None:
        return None
    return timing.step_s.expected_s, timing.evaluation_s.expected_s if timing.evaluation_s else 0.0


def expected_bytes(plan: Plan | None, *, on_card: bool) -> float | None:
    """The highest memory of the run as its lines measure it: what the allocator reserves on a card, else the process's.

    None where there is no plan.
    """
    if plan is None:
        return None
    memory = plan.memory_of("foretrain")
    context = memory.context.expected_bytes if on_card else 0
    return max(phase.needed_expected_bytes for phase in memory.phases) - context
