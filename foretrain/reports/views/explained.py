"""Where the memory goes, and the largest value of an option that fits: one view for each kind of run."""

from foretrain.analysis.components import Explanation
from foretrain.analysis.finetune_memory import FineTuneExplanation
from foretrain.base.messages import listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.largest import Largest
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.smallest import SmallestCard
from foretrain.reports.document import Document, Message
from foretrain.reports.views import explain, generation
from foretrain.reports.views.finetune import limits, whole
from foretrain.reports.views.line import line


def explanation(plan: AnyPlan, found: Explanation | FineTuneExplanation) -> Document:
    if isinstance(found, Explanation):
        assert isinstance(plan, Plan | ClusterPlan)
        return explain.document(rank_of(plan) if isinstance(plan, ClusterPlan) else plan, found)
    if isinstance(plan, InferencePlan):
        return generation.explain_document(plan, found)
    assert isinstance(plan, FineTunePlan)
    return whole.explain_document(plan, found)


def smallest(plan: AnyPlan, found: SmallestCard) -> Message:
    small = {f"small_{name}": value for name, value in found.too_small.model_dump().items()} if found.too_small else {}
    if not found.fitting:
        return Message("smallest.none", {"name": plan.name, **small})
    cards = listed([each.place for each in found.fitting])
    values = {"name": plan.name, **found.fitting[0].model_dump(), "cards": cards, **small}
    return Message("smallest.fits" if small else "smallest.any", values)


def largest(plan: AnyPlan, found: Largest) -> Document | Message:
    if isinstance(plan, FineTunePlan):
        return limits.largest(plan, found)
    if isinstance(plan, InferencePlan):
        return generation.most(plan)[0] if plan.longest_context else line(plan)
    return explain.largest(plan.one_card if isinstance(plan, ClusterPlan) else plan, found)
