"""What to change on several cards: every rule applied to the user's own run, planned again, ranked for a goal.

Goals are those of one card but for quality: fit, speed, cost. What trains on other tokens a step, or needs hardware
that was not named, comes after what does not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretrain.advice.candidates import WORTH, settings
from foretrain.advice.ranks.effects import effect, way_of
from foretrain.advice.ranks.planner import Outcome, Planner
from foretrain.advice.ranks.record import CardCount, ClusterAdvice
from foretrain.advice.ranks.rules import BY_ID, ORDER, RULES
from foretrain.advice.ranks.rules.base import Change, Rule, State
from foretrain.advice.ranks.rules.cards import counted, moved
from foretrain.advice.ranks.search import Candidate, Search, candidate, check, record_of
from foretrain.advice.record import Idle
from foretrain.advice.rules.base import Goal
from foretrain.base.units import MIB
from foretrain.config.sharing import Sharing
from foretrain.hardware.cluster import Cluster
from foretrain.predict.memory import estimated
from foretrain.predict.ranks.plan import of_one_rank, speed_up
from foretrain.predict.ranks.record import ClusterPlan
from foretrain.predict.speed.ranks import BUCKET_BYTES, rank_time, sharings


def counts(plan: ClusterPlan, now: Outcome, planner: Planner) -> tuple[CardCount, ...]:
    """One card first, then the numbers that are tried, with that of now among them."""
    one = plan.one_card
    alone = Outcome(now.state, one.memory_of("foretrain"), one.timing_of("foretrain"), one.available_bytes)
    found = [_count(plan, now, alone, plan.cluster.model_copy(update={"nodes": 1, "per_node": 1, "network": None}))]
    for cluster in sorted([plan.cluster, *counted(plan.cluster)], key=lambda each: each.world):
        outcome = now if cluster is plan.cluster else _on(now.state, cluster, planner)
        found.append(_count(plan, now, outcome, cluster))
    return tuple(found)


def _on(state: State, cluster: Cluster, planner: Planner) -> Outcome | None:
    """What the same run takes there, shared in the way that is asked for, else the quickest that fits."""
    change = moved(state, cluster)
    return planner.outcome(change.applied(state)) if change else None


def _count(plan: ClusterPlan, now: Outcome, outcome: Outcome | None, cluster: Cluster) -> CardCount:
    where: dict[str, Any] = {"cards": cluster.world, "nodes": cluster.nodes, "text": cluster.text}
    if outcome is None:
        config = plan.config
        split: dict[str, Any] = {"batch_size": config.batch_size, "accumulation": config.gradient_accumulation_steps}
        return CardCount(**where, **split, way=None, effect=None, speed_up=None, efficiency=None)
    config, alone = outcome.state.config, plan.one_card.timing_of("foretrain")
    factor = speed_up(alone.step_s, outcome.timing.step_s) if alone and outcome.timing else None
    return CardCount(
        **where, way=way_of(outcome) if outcome.rank else None, batch_size=config.batch_size,
        accumulation=config.gradient_accumulation_steps, effect=effect(now, outcome), speed_up=factor,
        efficiency=factor.expected / cluster.world if factor else None,
    )  # fmt: skip


# What DDP's buckets bring here: gradients that are views of them, which foretrain always has, and other sizes of
# them.
#
# Neither is an option of a config. The figures say why: what a card would take without views, and what the best other
# size would save.

SHOWN = 0.001  # of a step: less is nothing
SIZES = tuple(MIB * size for size in (1, 5, 10, 50, 100, 200, 400))


def buckets(plan: ClusterPlan, way: str) -> list[Idle]:
    """Both, where DDP or ZeRO-1 is what the cards do."""
    sharing = next(each for each in sharings(plan.cluster, plan.micro_batches) if each.id == way)
    return [] if sharing.way.shards_weights else [_views(plan, sharing), *_sizes(plan, sharing)]


def _views(plan: ClusterPlan, sharing: Sharing) -> Idle:
    whole = plan.one_card.spec("foretrain")
    ways = (sharing, replace(sharing, bucket_view=False))
    specs = [of_one_rank(whole, plan.cluster, each) for each in ways]
    # As in most steps: buckets that NCCL keeps in the second one are in both.
    ledgers = [estimated(spec, keeps=False) for spec in specs]
    now, without = (max(phase.allocated_bytes for phase in ledger.memory.phases) for ledger in ledgers)
    more = max(0, without - now)
    return Idle(rule="bucket_view", reason="bucket_view" if more else "bucket_view_same", values={"more": more})


def _sizes(plan: ClusterPlan, sharing: Sharing) -> list[Idle]:
    spec = of_one_rank(plan.one_card.spec("foretrain"), plan.cluster, sharing)
    now = rank_time(spec, sharing, plan.cluster)
    if now is None:
        return []
    steps = {size: rank_time(spec, sharing, plan.cluster, size) for size in SIZES}
    seconds = {size: time.step_s.expected_s for size, time in steps.items() if time}
    best = min(seconds, key=lambda size: seconds[size])
    gain = max(0.0, 1 - seconds[best] / now.step_s.expected_s)
    values = {"gain": gain, "best": best, "usual": BUCKET_BYTES}
    return [Idle(rule="bucket_size", reason="bucket_size" if gain >= SHOWN else "bucket_size_same", values=values)]


TOGETHER = 4  # changes at most, where none alone is enough


def default_goal(plan: ClusterPlan) -> Goal:
    """fit where it does not fit with its margin, else speed; fit too where speeds are not known."""
    rank = plan.best or plan.least
    return "fit" if rank.verdict not in ("fits", None) or rank.timing is None else "speed"


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
    best = min(tried, key=lambda each: each.outcome.needed_bytes)
    if search.goal == "fit":
        return Idle(rule=rule, reason="needs_more" if search.saved(best.outcome) <= -WORTH else "no_gain")
    if not any(each.outcome.fits for each in tried):
        return Idle(rule=rule, reason="beyond", values={"needed": best.outcome.needed_bytes})
    return Idle(rule=rule, reason="not_cheaper" if search.goal == "cost" else "not_faster")
