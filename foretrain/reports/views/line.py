"""A plan of any kind of run in one line, to be pasted into a forum or a chat."""

from foretrain.advice.best import Best
from foretrain.analysis.components import Explanation
from foretrain.analysis.finetune_memory import FineTuneExplanation
from foretrain.base.installation import installed
from foretrain.base.messages import listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.smallest import SmallestCard
from foretrain.reports.document import Document, Message, Quantity
from foretrain.reports.views import explain, finetune
from foretrain.reports.views.lead import name_of, strategy, sure_bytes
from foretrain.reports.views.shared import verdict_id


def explanation(plan: AnyPlan, found: Explanation | FineTuneExplanation) -> Document:
    if isinstance(found, Explanation):
        assert isinstance(plan, Plan | ClusterPlan)
        return explain.document(rank_of(plan) if isinstance(plan, ClusterPlan) else plan, found)
    assert isinstance(plan, FineTunePlan | InferencePlan)
    return finetune.explain_document(plan, found)


def smallest(plan: AnyPlan, found: SmallestCard) -> Message:
    small = {f"small_{name}": value for name, value in found.too_small.model_dump().items()} if found.too_small else {}
    if not found.fitting:
        return Message("smallest.none", {"name": plan.name, **small})
    cards = listed([each.place for each in found.fitting])
    values = {"name": plan.name, **found.fitting[0].model_dump(), "cards": cards, **small}
    return Message("smallest.fits" if small else "smallest.any", values)


def line(plan: AnyPlan, steps: int | None = None) -> Message:
    """Return the whole answer. `steps`: as many as fit in a limit."""
    timing, parts = plan.timing, [_memory(plan).text()]
    if isinstance(plan, ClusterPlan):
        parts.insert(0, strategy(plan.best or plan.least).text())
    if isinstance(plan, InferencePlan):
        size = {"batch": plan.asked.batch, "context": plan.asked.context}
        parts.insert(0, Message("inference.line_size", size).text())
    if steps is not None:
        parts.append(Message("first.line_steps", {"steps": steps}).text())
    if timing is not None and isinstance(plan, FineTunePlan | InferencePlan):
        parts.append(Message("finetune.line_speed", {"tokens": timing.tokens_per_s}).text())
    if timing is not None and timing.total_s is not None and plan.verdict not in REFUSED:
        total, money = timing.total_s, timing.money()
        parts.append(Quantity((total.low_s, total.expected_s, total.high_s), "rough_duration_span").text())
        if money is not None and money[1]:
            paid = {"amount": money[1], "currency": timing.prices.currency}
            parts.append(Message("value.amount_rough", paid).text())
    if isinstance(plan, ClusterPlan) and plan.best is not None and plan.best.speed_up is not None:
        parts.append(Message("cluster.line_times", {"expected": plan.best.speed_up.expected}).text())
    values = {"name": name_of(plan), "gpu": plan.place, "parts": listed(parts), "version": installed("foretrain")}
    return Message("first.line", {**values, "source": plan.needs.source})


def _memory(plan: AnyPlan) -> Message:
    if isinstance(plan, FineTunePlan) and plan.bound != "exact":
        room = {"needed": sure_bytes(plan), "available": plan.available_bytes or 0}
        return Message(f"first.line_bound.{plan.bound}.{plan.verdict or 'unknown'}", room)
    id = verdict_id(plan.verdict, plan.needed_bytes, plan.available_bytes)
    room = {"needed": plan.needed_bytes, "available": plan.available_bytes or 0}
    return Message(f"first.line_memory.{id}", room)


def best_line(plan: Plan, found: Best) -> Message:
    """Return the shape of lowest estimated loss."""
    winner = found.candidates[0]
    c = winner.config
    values = {
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "params": winner.n_params,
        "tokens": winner.tokens, "loss": winner.loss, "gpu": plan.place, "text": found.limit.text,
        "needed": winner.needed_bytes, "available": plan.available_bytes or 0, "version": installed("foretrain"),
    }  # fmt: skip
    return Message("first.best_line", values)
