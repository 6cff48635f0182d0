"""`foretrain advise` for a fine-tuning run: what makes it fit, or what makes it faster, each change planned."""

from typing import Literal

from foretrain.advice.finetune import FineTuneChange, changes, planned
from foretrain.advice.finetune_tries import FASTER
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import Verdict

FineTuneGoal = Literal["fit", "speed"]
LEAST_GAIN = 0.01  # of the time: a change that gains less is not advised


class TracedChange(Record):
    """What the trace of the real Trainer's loop says of a change; `reason` where it cannot be traced."""

    verdict: Verdict | None = None
    needed_bytes: int | None = None
    reason: str = ""


class AdvisedChange(FineTuneChange):
    """A change, and what its trace says where that was asked for."""

    traced: TracedChange | None = None


class FineTuneAdvice(Record):
    """The changes, best first. `goal` fit: that save memory; speed: that fit and take less time for a token."""

    goal: FineTuneGoal
    plan: FineTunePlan
    advised: tuple[AdvisedChange, ...]

    def top(self, count: int) -> "FineTuneAdvice":
        """The first ones."""
        return self.model_copy(update={"advised": self.advised[:count]})


def advise(plan: FineTunePlan, goal: FineTuneGoal | None = None) -> FineTuneAdvice:
    """What to change. `goal`: None is speed where the run fits, else fit."""
    goal = goal or ("speed" if plan.verdict == "fits" else "fit")
    found = changes(plan) if goal == "fit" else _faster(plan)
    return FineTuneAdvice(goal=goal, plan=plan, advised=tuple(AdvisedChange(**dict(change)) for change in found))


def _faster(plan: FineTunePlan) -> list[FineTuneChange]:
    """The quickest first: those after which the same is learned, then the others."""
    found = [change for id in FASTER if (change := planned(plan, (id,)))]
    worth = [each for each in found if each.verdict == "fits" and each.longer is not None and each.longer < -LEAST_GAIN]
    return sorted(worth, key=lambda change: (change.learns_otherwise, change.longer))
