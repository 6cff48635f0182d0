"""What is compared while advice for several cards is looked for: a change with its plan, what it costs, its record."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.advice.candidates import EACH_MORE, TOLLS, UNTIMED, WORTH, settings
from foretrain.advice.ranks.effects import effect, shards, way_of
from foretrain.advice.ranks.planner import Outcome, Planner
from foretrain.advice.ranks.record import ClusterChange
from foretrain.advice.ranks.rules import BY_ID, ORDER
from foretrain.advice.ranks.rules.base import Learning, Rule, State, loosest
from foretrain.advice.rules.base import Goal
from foretrain.base.errors import UserError
from foretrain.predict.plan import no_time
from foretrain.predict.ranks.record import ClusterPlan

OTHER_TOKENS = 0.5  # of the time: as another optimizer counts (advice/candidates.py)


@dataclass(frozen=True)
class Candidate:
    """Rules applied together. `buys`: other hardware than was named."""

    rules: tuple[str, ...]
    outcome: Outcome
    learning: Learning
    buys: bool


class Search:
    """What stays the same while advice is looked for."""

    def __init__(self, plan: ClusterPlan, goal: Goal) -> None:
        one, rank = plan.one_card, plan.best or plan.least
        self.goal, self.way, self.half = goal, rank.id, one.dtype != "float32"
        self.state = State(plan.config, plan.cluster, one.used_by_others_bytes, plan.ways)
        self.base = Outcome(self.state, rank.memory, rank.timing, one.available_bytes, rank)
        self.planner = Planner(one.timing)

    @property
    def must_fit(self) -> bool:
        return not self.base.fits

    def ratio(self, outcome: Outcome) -> float | None:
        """What the goal wants little of, for a token, over that of now, minus 1."""
        now, then = self._metric(self.base), self._metric(outcome)
        return then / now - 1 if now and then is not None else None

    def _metric(self, outcome: Outcome) -> float | None:
        tokens = outcome.state.config.tokens_per_step
        if self.goal == "cost":
            return None if outcome.money is None else outcome.money / tokens
        return 1 / outcome.timing.tokens_per_s if outcome.timing else None

    def saved(self, outcome: Outcome) -> float:
        """The share of what a card needs."""
        return 1 - outcome.needed_bytes / self.base.needed_bytes

    def rounds(self, outcome: Outcome) -> bool:
        """Whether it rounds otherwise: sharded weights are gathered in half precision, whole ones are autocast."""
        return self.half and shards(self.base) != shards(outcome)

    def price(self, candidate: Candidate) -> float:
        """What it costs as a share of the time, as with one card."""
        ratio = self.ratio(candidate.outcome)
        price = (UNTIMED if ratio is None else ratio) + EACH_MORE * (len(candidate.rules) - 1)
        price += OTHER_TOKENS if candidate.learning == "other tokens" else TOLLS[candidate.learning]
        price += sum(BY_ID[rule].toll for rule in candidate.rules)
        return price - (self.saved(candidate.outcome) if self.goal == "fit" and not self.must_fit else 0.0)

    def order(self, candidate: Candidate) -> tuple[bool, float, int]:
        """The least price first; what has to be bought last, unless the goal is cost."""
        bought = candidate.buys and self.goal != "cost"
        return bought, round(self.price(candidate), 3), ORDER[candidate.rules[-1]]

    def is_advice(self, candidate: Candidate) -> bool:
        """It fits, and buys what the goal wants."""
        if not candidate.outcome.fits:
            return False
        if self.goal == "fit":
            return self.must_fit or self.saved(candidate.outcome) >= WORTH
        ratio = self.ratio(candidate.outcome)
        return ratio is not None and (self.must_fit or ratio <= -WORTH)


def check(plan: ClusterPlan, search: Search) -> None:
    """Raise UserError where the goal needs what is not known."""
    gpu = plan.cluster.gpu.name
    if search.goal == "quality":
        raise UserError("usage.cluster_quality")
    if search.goal == "fit" and search.base.available_bytes is None:
        raise UserError("usage.advise_memory", gpu=gpu)
    if search.goal != "fit" and search.base.timing is None:
        raise no_time(plan.one_card, f"--goal {search.goal}")
    if search.goal == "cost" and not search.base.money:
        raise UserError("usage.no_price", text="--goal cost")


def candidate(search: Search, rules: Sequence[Rule], outcome: Outcome) -> Candidate:
    """Rules with the plan of the run after them."""
    dropout = search.state.config.dropout > 0
    learning: list[Learning] = [r.learning for r in rules]
    if search.rounds(outcome) or (dropout and any(rule.redraws for rule in rules)):
        learning.append("rounding")
    before, after = search.state.cluster, outcome.state.cluster
    buys = after.world > before.world or (after.link != before.link and after.world > 1)
    return Candidate(tuple(rule.id for rule in rules), outcome, loosest(learning), buys)


def record_of(search: Search, candidate: Candidate) -> ClusterChange:
    outcome, state = candidate.outcome, candidate.outcome.state
    rank = outcome.rank
    return ClusterChange(
        rules=candidate.rules, settings=settings(search.state.config, state.config), cards=state.cluster.world,
        nodes=state.cluster.nodes, text=state.cluster.text, link=state.cluster.link.name, way=way_of(outcome),
        learning=candidate.learning, tokens_per_step=state.config.tokens_per_step, effect=effect(search.base, outcome),
        speed_up=rank.speed_up if rank else None, buys=candidate.buys, price=round(search.price(candidate), 4),
    )  # fmt: skip
