"""What traces of the ranks add to a plan for several cards."""

from foretrain.app.exact import Listen, settings_of
from foretrain.predict.ranks.pays import with_pays
from foretrain.predict.ranks.record import ClusterPlan
from foretrain.predict.ranks.traced import traced
from foretrain.predict.trace import interpreter


def traced_cluster(plan: ClusterPlan, listen: Listen, python: str = "") -> ClusterPlan:
    """The plan with traced memory, by the torch of another environment where `python` names one; of each strategy that
    could not be traced it says why. Raises UserError."""
    with interpreter.using(python):
        return with_pays(traced(plan, settings_of(plan.one_card), listen))
