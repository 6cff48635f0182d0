"""What to change on several cards: every rule applied to the user's own run, planned again, ranked for a goal.

Goals are those of one card but for quality: fit, speed, cost. What trains on other tokens a step, or needs hardware
that was not named, comes after what does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.advice.candidates import EACH_MORE, TOLLS, UNTIMED, WORTH, settings
from foretrain.advice.ranks.buckets import buckets
from foretrain.advice.ranks.counts import counts
from foretrain.advice.ranks.effects import effect, shards, way_of
from foretrain.advice.ranks.planner import Outcome, Planner
from foretrain.advice.ranks.record import ClusterAdvice, ClusterChange
from foretrain.advice.ranks.rules import BY_ID, ORDER, RULES
from foretrain.advice.ranks.rules.base import Change, Learning, Rule, State, loosest
from foretrain.advice.record import Idle
from foretrain.advice.rules.base import Goal
from foretrain.base.errors import UserError
from foretrain.predict.plan import no_time
from foretrain.predict.ranks.record import ClusterPlan

OTHER_TOKENS = 0.5  # of the time: as another optimizer counts (advice/candidates.py)
TOGETHER = 4  # changes at most, where none alone is enough


@dataclass(frozen=True)
class _Candidate:
    rules: tuple[str, ...]
    outcome: Outcome
    learning: Learning
    buys: bool


class _Search:
    """What stays the same while advice is looked for."""

    def __init__(self, plan: ClusterPlan, goal: Goal) -> None:
        one, rank = plan.one_card, plan.best or plan.least
        ways = tuple(each.id for each in plan.ranks if each.strategy == rank.strategy) if plan.asked else ()
        self.goal, self.way, self.half = goal, rank.id, one.dtype != "float32"
        self.state = State(plan.config, plan.cluster, one.used_by_others_bytes, ways)
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

    def price(self, candidate: _Candidate) -> float:
        """What it costs as a share of the time, as with one card."""
        ratio = self.ratio(candidate.outcome)
        price = (UNTIMED if ratio is None else ratio) + EACH_MORE * (len(candidate.rules) - 1)
        price += OTHER_TOKENS if candidate.learning == "other tokens" else TOLLS[candidate.learning]
        price += sum(BY_ID[rule].toll for rule in candidate.rules)
        return price - (self.saved(candidate.outcome) if self.goal == "fit" and not self.must_fit else 0.0)

    def order(self, candidate: _Candidate) -> tuple[bool, float, int]:
        """The least price first; what has to be bought last, unless the goal is cost."""
        bought = candidate.buys and self.goal != "cost"
        return bought, round(self.price(candidate), 3), ORDER[candidate.rules[-1]]

    def is_advice(self, candidate: _Candidate) -> bool:
        """It fits, and buys what the goal wants."""
        if not candidate.outcome.fits:
            return False
        if self.goal == "fit":
            return self.must_fit or self.saved(candidate.outcome) >= WORTH
        ratio = self.ratio(candidate.outcome)
        return ratio is not None and (self.must_fit or ratio <= -WORTH)


def default_goal(plan: ClusterPlan) -> Goal:
    """fit where it does not fit with its margin, else speed; fit too where speeds are not known."""
    rank = plan.best or plan.least
    return "fit" if rank.verdict in ("tight", "does_not_fit") or rank.timing is None else "speed"


def advise(plan: ClusterPlan, goal: Goal | None = None) -> ClusterAdvice:
    """All advice for a plan of several cards. Raises UserError where the goal needs what is not known."""
    wanted = goal or default_goal(plan)
    search = _Search(plan, wanted)
    _check(plan, search)
    found, idle = _singles(search)
    kept = _worthwhile(search, [each for each in found if search.is_advice(each)])
    if search.must_fit and not any(not each.buys for each in kept):
        kept += _together(search, found)
    partial = [
        each for each in found if search.must_fit and not each.outcome.fits and search.saved(each.outcome) >= WORTH
    ]
    partial.sort(key=lambda each: each.outcome.needed_bytes)
    used = {rule for each in (*kept, *partial) for rule in each.rules}
    alone: dict[str, list[_Candidate]] = {}
    for each in found:
        alone.setdefault(each.rules[0], []).append(each)
    idle += buckets(plan, search.way)
    idle += [_nothing(search, rule, tried) for rule, tried in alone.items() if rule not in used]
    kept.sort(key=search.order)
    return ClusterAdvice(
        name=plan.name, goal=wanted, goal_given=goal is not None, cluster=plan.cluster, way=way_of(search.base),
        tokens_per_step=plan.config.tokens_per_step, now=effect(search.base, search.base),
        counts=counts(plan, search.base, search.planner),
        advised=tuple(_record(search, each) for each in kept), partial=tuple(_record(search, each) for each in partial),
        useless=tuple(sorted(idle, key=lambda each: ORDER.get(each.rule, len(ORDER)))), planned=search.planner.planned,
        nothing_fits=search.must_fit and not kept,
    )  # fmt: skip


def _check(plan: ClusterPlan, search: _Search) -> None:
    gpu = plan.cluster.gpu.name
    if search.goal == "quality":
        raise UserError("usage.cluster_quality")
    if search.goal == "fit" and search.base.available_bytes is None:
        raise UserError("usage.advise_memory", gpu=gpu)
    if search.goal != "fit" and search.base.timing is None:
        raise no_time(plan.one_card, f"--goal {search.goal}")
    if search.goal == "cost" and not search.base.money:
        raise UserError("usage.no_price", text="--goal cost")


def _looks_at(search: _Search, rule: Rule) -> bool:
    """Whether a rule can serve the goal."""
    if search.goal == "fit" or search.must_fit:
        return rule.kind in ("memory", "both")
    return rule.kind in ("speed", "both")


def _singles(search: _Search) -> tuple[list[_Candidate], list[Idle]]:
    """Every rule alone, and those that have nothing to change."""
    found: list[_Candidate] = []
    idle: list[Idle] = []
    for rule in RULES:
        if not _looks_at(search, rule):
            continue
        start = _start(search, rule)
        changes = rule.options(start, search.way)
        if not changes and (reason := rule.idle(start, search.way)):
            idle.append(Idle(rule=rule.id, reason=reason))
        found += [_candidate(search, (rule,), outcome) for outcome in _outcomes(search, rule, start, changes)]
    return found, idle


def _start(search: _Search, rule: Rule) -> State:
    state = search.state
    return State(state.config, state.cluster, state.used_by_others_bytes, (search.way,)) if rule.keeps_way else state


def _outcomes(search: _Search, rule: Rule, start: State, changes: Sequence[Change]) -> list[Outcome]:
    if not changes:
        return []
    if rule.alternatives:
        made = [search.planner.outcome(change.applied(start)) for change in changes]
        return [each for each in made if each is not None]
    if search.must_fit:
        picked = search.planner.mildest(start, changes)
    elif search.goal == "fit":
        picked = search.planner.outcome(changes[rule.usual(changes)].applied(start))
    else:
        picked = search.planner.quickest(start, changes)
    return [picked] if picked else []


def _candidate(search: _Search, rules: Sequence[Rule], outcome: Outcome) -> _Candidate:
    dropout = search.state.config.dropout > 0
    learning: list[Learning] = [r.learning for r in rules]
    if search.rounds(outcome) or (dropout and any(rule.redraws for rule in rules)):
        learning.append("rounding")
    before, after = search.state.cluster, outcome.state.cluster
    buys = after.world > before.world or (after.link != before.link and after.world > 1)
    return _Candidate(tuple(rule.id for rule in rules), outcome, loosest(learning), buys)


def _worthwhile(search: _Search, fitting: list[_Candidate]) -> list[_Candidate]:
    """The best of each rule; one change of the cards' number, the next that is worth it."""
    kept: dict[str, _Candidate] = {}
    for each in sorted(fitting, key=search.order):
        kept.setdefault(each.rules[0], each)
    return list(kept.values())


def _together(search: _Search, found: list[_Candidate]) -> list[_Candidate]:
    """One set of changes that fits, each of which saves memory alone: added one after another, the cheapest for what
    they save first, and those that turn out not to be needed taken away again. None where all do not fit."""
    saving = [each for each in found if search.saved(each.outcome) >= WORTH and not each.buys]
    saving.sort(key=lambda each: search.price(each) - search.saved(each.outcome))
    distinct = list({each.rules[0]: each for each in reversed(saving)}.values())[::-1][:TOGETHER]
    for count in range(2, len(distinct) + 1):
        if (made := _joined(search, distinct[:count])) is not None and made.outcome.fits:
            for each in distinct[:count]:
                fewer = [other for other in distinct[:count] if other is not each and other.rules[0] in made.rules]
                less = _joined(search, fewer) if len(fewer) > 1 else None
                made = less if less is not None and less.outcome.fits else made
            return [made]
    return []


def _joined(search: _Search, parts: Sequence[_Candidate]) -> _Candidate | None:
    """Several changes at once. Options that a single one left as they were stay as they are."""
    base, update, ways = search.state, {}, search.state.ways
    for part in parts:
        after = part.outcome.state
        update |= {s.option: s.after for s in settings(base.config, after.config)}
        ways = after.ways if after.ways != base.ways and not BY_ID[part.rules[0]].keeps_way else ways
    outcome = search.planner.outcome(Change(update, ways=ways).applied(base))
    return _candidate(search, [BY_ID[part.rules[0]] for part in parts], outcome) if outcome else None


def _nothing(search: _Search, rule: str, tried: list[_Candidate]) -> Idle:
    """Why a change that was planned is not advised."""
    best = min(tried, key=lambda each: each.outcome.needed_bytes)
    if search.goal == "fit":
        return Idle(rule=rule, reason="needs_more" if search.saved(best.outcome) <= -WORTH else "no_gain")
    if not any(each.outcome.fits for each in tried):
        return Idle(rule=rule, reason="beyond", values={"needed": best.outcome.needed_bytes})
    return Idle(rule=rule, reason="not_cheaper" if search.goal == "cost" else "not_faster")


def _record(search: _Search, candidate: _Candidate) -> ClusterChange:
    outcome, state = candidate.outcome, candidate.outcome.state
    rank = outcome.rank
    return ClusterChange(
        rules=candidate.rules, settings=settings(search.state.config, state.config), cards=state.cluster.world,
        nodes=state.cluster.nodes, text=state.cluster.text, link=state.cluster.link.name, way=way_of(outcome),
        learning=candidate.learning, tokens_per_step=state.config.tokens_per_step, effect=effect(search.base, outcome),
        speed_up=rank.speed_up if rank else None, buys=candidate.buys, price=round(search.price(candidate), 4),
    )  # fmt: skip
