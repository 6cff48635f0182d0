"""What to change in a run on several cards, each change planned. `foretrain.advise_cluster` for Python."""

from typing import Any

from foretrain.advice.ranks.advisor import advise
from foretrain.advice.ranks.record import ClusterAdvice
from foretrain.advice.rules.base import Goal
from foretrain.app.plan import Config
from foretrain.app.ranks.plan import plan_cluster
from foretrain.hardware.cluster import Cluster
from foretrain.predict.ranks.record import ClusterPlan


def advise_cluster(
    config: Config = "gpt2-124m", gpus: str | Cluster = "", *, goal: Goal | None = None, **options: Any
) -> ClusterAdvice:
    """What to change, ranked by gain and cost: `foretrain.advise_cluster("gpt2-774m", "2 x RTX 4090").advised[0]`.

    `counts` of the answer says what 1, 2, 4 and 8 cards would give. `goal`: "fit", "speed" or "cost"; None: what the
    run needs most. The others are as in `plan_cluster`. Raises UserError for what cannot be planned.
    """
    return advices(plan_cluster(config, gpus, **options), goal)


def advices(plan: ClusterPlan, goal: Goal | None) -> ClusterAdvice:
    """The changes to a plan of several cards."""
    return advise(plan, goal)
