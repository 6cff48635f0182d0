"""What a report shows beyond a plan's own figures: one step moment by moment, the roofline, what else one could do."""

from dataclasses import dataclass

from foretrain.advice import frontier
from foretrain.advice.card_options import CardOption, card_options
from foretrain.advice.frontier import Frontier
from foretrain.predict.plan import Plan
from foretrain.predict.spec import StepName
from foretrain.predict.speed.roofline import Roofline, roofline
from foretrain.predict.step_moments import StepMoments, step_moments
from foretrain.tuning.record import Tuning


@dataclass(frozen=True)
class Outlook:
    """Of one plan and one way to run the step. None and () where nothing is known."""

    step: StepName
    moments: StepMoments | None
    roofline: Roofline | None
    frontier: Frontier | None
    cards: tuple[CardOption, ...]


def outlook(plan: Plan, step: StepName, *, traced: StepMoments | None = None, tuning: Tuning | None = None) -> Outlook:
    """Arithmetic, in about a second. `traced`: the moments of the real step; `tuning`: what was measured instead."""
    spec = plan.spec(step)
    moments = traced or step_moments(spec)
    measured = frontier.measured(tuning, plan.available_bytes) if tuning else None
    return Outlook(
        step=step, moments=None if plan.config.eval_only else moments,
        roofline=roofline(spec),
        frontier=measured or frontier.predicted(plan, step), cards=card_options(plan, step),
    )  # fmt: skip
