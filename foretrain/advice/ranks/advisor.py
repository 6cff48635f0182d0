"""What to change on several cards: every rule applied to the user's own run, planned again, ranked for a goal.

Goals are those of one card but for quality: fit, speed, cost. What trains on other tokens a step, or needs hardware
that was not named, comes after what does not.
"""

from collections.abc import Sequence

from foretrain.advice.candidates import WORTH, settings
from foretrain.advice.ranks.buckets import buckets
from foretrain.advice.ranks.counts import counts
from foretrain.advice.ranks.effects import effect, way_of
from foretrain.advice.ranks.planner import Outcome
from foretrain.advice.ranks.record import ClusterAdvice
from foretrain.advice.ranks.rules import BY_ID, ORDER, RULES
from foretrain.advice.ranks.rules.base import Change, Rule, State
from foretrain.advice.ranks.search import Candidate, Search, candidate, check, record_of
from foretrain.advice.record import Idle
from foretrain.advice.rules.base import Goal
from foretrain.predict.ranks.record import ClusterPlan

TOGETHER = 4  # changes at most, where none alone is enough


def default_goal(plan: ClusterPlan) -> Goal:
    """fit where it does not fit with its margin, else speed; fit too where speeds are not known."""
    rank = plan.best or plan.least
    return "fit" if rank.verdict in ("tight", "does_not_fit") or rank.timing is None else "speed"


def advise(plan: ClusterPlan, goal: Goal | None = None) -> ClusterAdvice:
    """All advice for a plan of several cards. Raises UserError where the goal needs what is not known."""
    wanted = goal or default_goal(plan)
    search = Search(plan, wanted)
    check(plan, search)
    found, idle = _singles(search)
    kept = _worthwhile(search, [each for each in found if search.is_advice(each)])
    if search.must_fit and not any(not each.buys for each in kept):
        kept += _together(search, found)
    partial = [
        each for each in found if search.must_fit and not each.outcome.fits and search.saved(each.outcome) >= WORTH
    ]
    partial.sort(key=lambda each: each.outcome.needed_bytes)
    used = {rule for each in (*kept, *partial) for rule in each.rules}
    alone: dict[str, list[Candidate]] = {}
    for each in found:
        alone.setdefault(each.rules[0], []).append(each)
    idle += buckets(plan, search.way)
    idle += [_nothing(search, rule, tried) for rule, tried in alone.items() if rule not in used]
    kept.sort(key=search.order)
    return ClusterAdvice(
        name=plan.name, goal=wanted, goal_given=goal is not None, cluster=plan.cluster, way=way_of(search.base),
        tokens_per_step=plan.config.tokens_per_step, now=effect(search.base, search.base),
        counts=counts(plan, search.base, search.planner),
        advised=tuple(record_of(search, each) for each in kept),
        partial=tuple(record_of(search, each) for each in partial),
        useless=tuple(sorted(idle, key=lambda each: ORDER.get(each.rule, len(ORDER)))), planned=search.planner.planned,
        nothing_fits=search.must_fit and not kept,
    )  # fmt: skip


def _looks_at(search: Search, rule: Rule) -> bool:
    """Whether a rule can serve the goal."""
    if search.goal == "fit" or search.must_fit:
        return rule.kind in ("memory", "both")
    return rule.kind in ("speed", "both")


def _singles(search: Search) -> tuple[list[Candidate], list[Idle]]:
    """Every rule alone, and those that have nothing to change."""
    found: list[Candidate] = []
    idle: list[Idle] = []
    for rule in RULES:
        if not _looks_at(search, rule):
            continue
        start = _start(search, rule)
        changes = rule.options(start, search.way)
        if not changes and (reason := rule.idle(start, search.way)):
            idle.append(Idle(rule=rule.id, reason=reason))
        found += [candidate(search, (rule,), outcome) for outcome in _outcomes(search, rule, start, changes)]
    return found, idle


def _start(search: Search, rule: Rule) -> State:
    state = search.state
    return State(state.config, state.cluster, state.used_by_others_bytes, (search.way,)) if rule.keeps_way else state


def _outcomes(search: Search, rule: Rule, start: State, changes: Sequence[Change]) -> list[Outcome]:
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


def _worthwhile(search: Search, fitting: list[Candidate]) -> list[Candidate]:
    """The best of each rule; one change of the cards' number, the next that is worth it."""
    kept: dict[str, Candidate] = {}
    for each in sorted(fitting, key=search.order):
        kept.setdefault(each.rules[0], each)
    return list(kept.values())


def _together(search: Search, found: list[Candidate]) -> list[Candidate]:
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


def _joined(search: Search, parts: Sequence[Candidate]) -> Candidate | None:
    """Several changes at once. Options that a single one left as they were stay as they are."""
    base, update, ways = search.state, {}, search.state.ways
    for part in parts:
        after = part.outcome.state
        update |= {s.option: s.after for s in settings(base.config, after.config)}
        ways = after.ways if after.ways != base.ways and not BY_ID[part.rules[0]].keeps_way else ways
    outcome = search.planner.outcome(Change(update, ways=ways).applied(base))
    return candidate(search, [BY_ID[part.rules[0]] for part in parts], outcome) if outcome else None


def _nothing(search: Search, rule: str, tried: list[Candidate]) -> Idle:
    """Why a change that was planned is not advised."""
    best = min(tried, key=lambda each: each.outcome.needed_bytes)
    if search.goal == "fit":
        return Idle(rule=rule, reason="needs_more" if search.saved(best.outcome) <= -WORTH else "no_gain")
    if not any(each.outcome.fits for each in tried):
        return Idle(rule=rule, reason="beyond", values={"needed": best.outcome.needed_bytes})
    return Idle(rule=rule, reason="not_cheaper" if search.goal == "cost" else "not_faster")
