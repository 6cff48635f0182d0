"""What to change: every rule applied to the user's run, planned again, ranked for a goal (docs/advice.md). No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from foretrain.advice import combine, finetune
from foretrain.advice.cluster import buckets, counts, together
from foretrain.advice.planner import Outcome, Planner, outcome_of
from foretrain.advice.quality import lower_losses
from foretrain.advice.record import Advice, Advices, Idle, Way, with_settings
from foretrain.advice.rules import BY_ID, ORDER, RULES
from foretrain.advice.rules.base import Change, Exactness, Goal, Rule, State
from foretrain.advice.search import WORTH, AnyPlan, Search, Try, goal_of
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Gpu, catalogue, find
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.plan import Plan
from foretrain.predict.plan import plan as plan_of
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.spec import StepName, choose_dtype

TOLLS: dict[Exactness, float] = {
    "exact": 0.0, "rounding": 0.05, "other tokens": 0.5, "other optimizer": 0.5, "other model": 1.0,
}  # fmt: skip
EACH_MORE = 0.01
UNTIMED = 0.3  # slowdown that is taken where nothing is known of the card's speed
SHORT, LARGE_GAIN = 3, 0.1  # changes on a plan's screen, and how much of the run's time they have to save
ENOUGH = 3  # exact single changes that fit: then no sets are searched


def start_of(plan: Plan, step: StepName) -> State:
    return State(plan.config, plan.gpu, step, plan.used_by_others_bytes)


def state_of(advice: Advice, plan: Plan) -> State:
    gpu = plan.gpu if advice.gpu == plan.gpu.name else find(advice.gpu)
    return State(with_settings(plan.config, advice.settings), gpu, advice.trainer, advice.used_by_others_bytes)


def advise(
    plan: AnyPlan,
    step: StepName | None = None,
    goal: Goal | None = None,
    *,
    rents: dict[str, float] | None = None,
    quick: bool = False,
) -> Advices:
    """All advice for a plan of any kind of run; of pretraining for the step that is meant, or for `step`. `rents`: of
    other cards, by name. `quick`: only a plan's short list. Raises UserError where the goal needs a memory or speed
    that is not known."""
    if isinstance(plan, FineTunePlan | InferencePlan):
        return finetune.advise(plan, goal)
    search = search_of(plan, step or (plan.step if isinstance(plan, Plan) else "foretrain"), goal, rents)
    known: dict[str, Any] = {}
    if isinstance(plan, ClusterPlan):
        way = Way.of(plan.best or plan.least)
        known = {"cluster": plan.cluster, "way": way, "counts": counts(plan, search)}
    if search.goal == "quality":
        return lower_losses(plan, search, lambda: advise(plan, step, "speed"), goal, **known)
    singles, idle = _singles(search, quick)
    found = [*singles, *_sets(search, singles, quick)]
    if isinstance(plan, ClusterPlan):
        return _answer(plan.one_card, search, goal, found, [*idle, *buckets(plan, search.state.way)], **known)
    if not quick or not any(c.fits for c in found):
        found += _cards(search, found)
    return _answer(plan, search, goal, found, idle)


def short_list(plan: Plan, step: StepName) -> Advices | None:
    """Return the three best changes for a plan's screen; None where nothing pays, or the plan is traced."""
    timing = plan.timing_of(step)
    if plan.exact or plan.config.eval_only or (plan.available_bytes is None and timing is None):
        return None
    found = advise(plan, step, quick=True)
    gains = [a for a in found.advised if found.goal == "fit" or (a.effect.longer or 0.0) <= -LARGE_GAIN]
    if not gains:
        return None
    return found.model_copy(update={"advised": tuple(gains[:SHORT]), "partial": (), "useless": ()})


def search_of(
    plan: Plan | ClusterPlan, step: StepName, goal: Goal | None, rents: dict[str, float] | None = None
) -> Search:
    """Raises UserError as `advise` does."""
    if isinstance(plan, ClusterPlan):
        rank, one, cluster = plan.best or plan.least, plan.one_card, plan.cluster
        state = State(one.config, cluster.gpu, step, one.used_by_others_bytes, cluster, plan.ways, rank.id)
        planner = Planner(lambda state, count: outcome_of(state, count, one.timing))
        base = Outcome(state, rank.memory, one.available_bytes, lambda: rank.timing, rank)
    else:
        planner = Planner()
        base = planner.outcome(start_of(plan, step))
    assert base is not None
    return Search(planner, base, goal_of(plan, base, goal), BY_ID, price, best_first, rents or {})


def _answer(plan: Plan, search: Search, goal: Goal | None, found: list[Try], idle: list[Idle], **known: Any) -> Advices:
    distinct: dict[State, Try] = {}
    for each in sorted(found, key=lambda c: (len(c.rules), search.order(c))):
        distinct.setdefault(each.state, each)
    advised = _worthwhile(search, [c for c in distinct.values() if _is_advice(search, c)])
    partial = [c for c in distinct.values() if not c.fits and search.must_fit and _saves(search, c)]
    partial.sort(key=lambda c: c.needed_bytes)
    buys = {rule for c in (*advised, *partial) for rule in (c.rules if search.state.cluster else c.rules[-1:])}
    alone = [c for c in distinct.values() if c.rules[-1] not in buys and c.rules[:-1] in ((), ("foretrain_step",))]
    alone.sort(key=lambda c: BY_ID[c.rules[-1]].alternatives * -c.needed_bytes)  # the last one counts
    useless = {each.rule: each for each in (*idle, *(_nothing(search, c) for c in alone)) if each.rule not in buys}
    known |= {
        "partial": tuple(map(search.advice, partial)),
        "useless": tuple(sorted(useless.values(), key=lambda each: ORDER.get(each.rule, len(ORDER)))),
    }
    return search.answer(plan, goal, map(search.advice, advised), **known)


# -- prices --------------------------------------------------------------------------------------------------------


def price(search: Search, tried: Try) -> float:
    """See the head of the module; where all fits already and memory is the goal, what is saved counts for it."""
    ratio = search.ratio(tried.outcome)
    price = (UNTIMED if ratio is None else ratio) + TOLLS[tried.exactness]
    gpu = tried.state.gpu.name
    if search.goal == "cost" and gpu in search.rents and gpu != search.state.gpu.name:
        return price + EACH_MORE * (len(tried.rules) - 1)  # its money is all that it costs
    if tried.exactness == "other model" or gpu != search.state.gpu.name:
        price = max(0.0, price - TOLLS[tried.exactness]) + TOLLS[tried.exactness]
        price += given_up(search.state.config, tried.state.config)
    price += sum(BY_ID[rule].toll for rule in tried.rules) + EACH_MORE * (len(tried.rules) - 1)
    if search.goal == "fit" and not search.must_fit:
        price -= search.saved(tried.outcome) / search.base.needed_bytes
    return price


def best_first(search: Search, tried: Try) -> tuple[bool, float, int]:
    """Lowest price first; of equal ones, what users can afford first. What has to be bought comes last, unless the
    goal is cost and its price is given."""
    bought = tried.buys(search.state) and search.goal != "cost"
    return bought, round(search.price(tried), 3), ORDER[tried.rules[-1]]


def given_up(before: RunConfig, after: RunConfig) -> float:
    """The share of parameters, and of context, that a smaller model has less."""
    params = ModelShape.of(after).n_params / ModelShape.of(before).n_params
    return max(0.0, 1 - params) + max(0.0, 1 - after.block_size / before.block_size)


# -- what is advised -------------------------------------------------------------------------------------------------


def _before(search: Search, tried: Try) -> Outcome:
    """The plan without the tried's last rule where that was foretrain's step, else the run as it is."""
    if tried.rules[:-1] == ("foretrain_step",):
        for change in BY_ID["foretrain_step"].changes(search.state):
            return search.planner.outcome(change.applied(search.state)) or search.base
    return search.base


def _evaluation_bytes(outcome: Outcome) -> int:
    """What evaluations take themselves: what the allocator keeps from the steps before them is not theirs."""
    phases = (p for p in outcome.memory.phases if p.phase.startswith("evaluate"))
    return max(phase.allocated_bytes for phase in phases) + outcome.memory.context.expected_bytes


def _saves(search: Search, tried: Try) -> bool:
    before = _before(search, tried).needed_bytes
    return before - tried.needed_bytes >= WORTH * before


def _worthwhile(search: Search, fitting: list[Try]) -> list[Try]:
    """The cheapest of each set of rules; none that only adds rules to a cheaper one."""
    kept: list[Try] = []
    for tried in sorted(fitting, key=search.order):
        if not any(set(other.rules) <= set(tried.rules) for other in kept):
            kept.append(tried)
    return kept


def _is_advice(search: Search, tried: Try) -> bool:
    """It fits, and it buys what the goal wants. What trains on fewer tokens a step is never advised."""
    now, then = search.state.config.tokens_per_step, tried.state.config.tokens_per_step
    kept = then >= now if search.state.cluster else then == now
    if not tried.fits or not kept:
        return False
    if search.goal == "fit":
        return _makes_room(search, tried) if search.must_fit else search.saves(tried.outcome)
    ratio = search.ratio(tried.outcome)
    return ratio is not None and (search.must_fit or ratio <= -WORTH)


def _makes_room(search: Search, tried: Try) -> bool:
    """Whether it takes less than now, or is given more."""
    state, now, room = tried.state, search.state, tried.outcome.available_bytes
    given = state.gpu.name != now.gpu.name or state.used_by_others_bytes < now.used_by_others_bytes
    takes = tried.needed_bytes if room is None else min(tried.needed_bytes, room)
    return given or takes < search.base.needed_bytes


def _nothing(search: Search, tried: Try) -> Idle:
    rule, before = tried.rules[-1], _before(search, tried)
    saved = before.needed_bytes - tried.needed_bytes
    effect = search.effect(tried.outcome)
    values: dict[str, float | None] = {"saved": max(0, saved), "slower": effect.slower}
    values["shorter"] = None if effect.longer is None else max(0.0, -effect.longer)
    if search.goal == "fit":
        if (before.fits or not search.must_fit) and saved >= WORTH * before.needed_bytes:
            return Idle(rule=rule, reason="not_needed", values={**values, "needed": before.needed_bytes})
        if rule in ("eval_batch", "eval_block_size"):
            own = _evaluation_bytes(search.base)  # of the run as it is, unless only foretrain's step is so
            seen = search.base if own < search.base.needed_bytes else before
            values |= {"evaluation": _evaluation_bytes(seen), "worst": seen.needed_bytes}
            return Idle(rule=rule, reason="not_the_peak", values=values)
        if rule in ("eval_iters", "accumulation"):
            return Idle(rule=rule, reason="no_peak", values=values)
        if rule == "free_others":
            values |= {"needed": before.needed_bytes, "available": tried.outcome.available_bytes or 0}
            return Idle(rule=rule, reason="enough_already" if not search.must_fit else "not_enough", values=values)
        more = -saved >= WORTH * before.needed_bytes  # less is where the replay happened to put a tensor
        return Idle(rule=rule, reason="needs_more" if more else "no_gain", values=values)
    if not tried.fits:
        return Idle(rule=rule, reason="beyond", values={**values, "needed": tried.needed_bytes})
    if rule == "accumulation":
        return Idle(rule=rule, reason="fewer_tokens", values=values)
    cheaper = search.goal == "cost" and search.state.cluster is not None
    return Idle(rule=rule, reason="not_cheaper" if cheaper else "not_faster", values=values)


# -- one rule ------------------------------------------------------------------------------------------------------


def _looks_at(search: Search, rule: Rule, quick: bool) -> bool:
    if quick and not rule.quick:
        return False
    if search.state.cluster:
        return rule.kind in ("both", "memory" if search.goal == "fit" or search.must_fit else "speed")
    if search.goal == "fit" or search.must_fit:
        return rule.kind in ("memory", "both", "model", "folklore")
    return rule.kind in ("speed", "both", "folklore") or (not quick and rule.lets_grow)


def _singles(search: Search, quick: bool) -> tuple[list[Try], list[Idle]]:
    """Every rule alone, as it stands and by foretrain's step; and the rules that have nothing to change."""
    found: list[Try] = []
    idle: list[Idle] = []
    starts = list(combine.starts(search))
    most = _most(search) if quick else None
    for rule in RULES:
        if not _looks_at(search, rule, quick):
            continue
        for prefix, start in starts:
            if (prefix and not rule.ours and rule.kind != "both") or not combine.allowed(rule.id, start):
                continue
            if start.cluster and rule.keeps_way:
                start = replace(start, ways=(start.way,))
            changes = rule.changes(start)
            changes = changes if most is None else _gaining(search, start, changes, most)
            if not changes:
                if reason := rule.idle(start):
                    idle.append(Idle(rule=rule.id, reason=reason))
            elif rule.traced:
                idle.append(Idle(rule=rule.id, reason="needs_trace"))
            elif quick and prefix:
                continue
            elif rule.alternatives:
                made = [search.planner.outcome(change.applied(start)) for change in changes]
                found += [search.of((rule.id,), each) for each in made if each is not None]
            elif (picked := _pick(search, rule, start, changes)) is not None:
                found.append(search.of((*prefix, rule.id), picked))
    return found, idle


def _most(search: Search) -> float | None:
    """The ratio that a plan's screen wants at most, where one rule alone applies, so that no set is quicker."""
    looked_at = (rule for rule in RULES if _looks_at(search, rule, quick=True) and not rule.traced)
    applying = [rule for rule in looked_at if combine.allowed(rule.id, search.state) and rule.changes(search.state)]
    alone = search.goal == "speed" and not (search.must_fit or search.state.cluster) and len(applying) == 1
    return -LARGE_GAIN if alone and not applying[0].alternatives else None


def _gaining(search: Search, start: State, options: Sequence[Change], most: float) -> Sequence[Change]:
    """The options whose run takes at most this much of the time: what the others need, nobody asks."""
    made = ((option, search.planner.outcome(option.applied(start))) for option in options)
    return [option for option, each in made if each and (search.ratio(each) or 0.0) <= most]


def _pick(search: Search, rule: Rule, start: State, options: Sequence[Change]) -> Outcome | None:
    """The plan of the option of a rule that serves the goal best."""
    if (start.cluster or rule.kind == "speed") and search.goal != "fit" and not search.must_fit:
        pick = search.planner.fastest_of_rising if start.cluster else search.planner.fastest
        best = pick(start, options)
        return best[1] if best else search.planner.outcome(options[0].applied(start))
    there = search.base if start.cluster else search.planner.outcome(start)
    if there is None or (search.must_fit and not there.fits):
        best = search.planner.smallest_change(start, options)
        return best[1] if best else None
    return search.planner.outcome(options[rule.usual(options)].applied(start))


# -- several -------------------------------------------------------------------------------------------------------


def _sets(search: Search, singles: list[Try], quick: bool) -> Iterator[Try]:
    if search.state.cluster:
        if search.must_fit and not any(c.fits and not c.buys(search.state) for c in singles):
            yield from together(search, singles)
        return
    if search.must_fit:
        exact = [c for c in singles if c.fits and c.exactness == "exact"]
        cheap = quick and any(search.price(c) <= EACH_MORE for c in exact)  # a set costs more
        if not cheap and len(exact) < ENOUGH:
            yield from combine.fitting(search, singles, alternatives=not quick)
        return
    if search.goal in ("speed", "cost"):
        kinds = ("speed", "both", "memory")
        gaining = [c.rules[-1] for c in singles if len(c.rules) == 1 and BY_ID[c.rules[-1]].kind in kinds]
        gaining = [rule for rule in gaining if BY_ID[rule].exactness in ("exact", "rounding")]
        savers = [] if quick else [rule.id for rule in RULES if rule.lets_grow]
        yield from combine.faster(search, [*dict.fromkeys([*gaining, *savers])])


def _cards(search: Search, found: list[Try]) -> Iterator[Try]:
    """Another card, where the goal can be reached by one; with the strongest exact changes where none fits as is."""
    if search.goal == "speed" or (search.goal == "cost" and not search.rents):
        return
    if search.goal == "fit" and not search.must_fit:
        return
    alone = other_cards(search)
    yield from alone
    if alone or not search.must_fit or any(c.fits for c in found):
        return
    for prefix, start in combine.starts(search):
        best = combine.strongest(search, start, combine.EXACT)
        if best is not None:
            members = tuple(rule for rule in BY_ID if rule in best[0])
            yield from other_cards(search, best[1].state, (*prefix, *members, "micro_batch"))


def usable(gpu: Gpu, state: State) -> bool:
    """Whether the card can be bought or rented and runs the config as it stands, memory aside."""
    if gpu.kind != "cuda" or gpu.memory_bytes is None or gpu.name == state.gpu.name or gpu.is_laptop:
        return False
    if not gpu.fp16_dense_tflops:  # no time of training is known there
        return False
    if choose_dtype(state.config, gpu, state.step)[0] == "bfloat16" and not gpu.supports_bf16:
        return False
    return gpu.has_triton or not state.config.compile


def other_cards(search: Search, state: State | None = None, rules: tuple[str, ...] = ()) -> list[Try]:
    """One tried, or two where rents are given; `state` and `rules`: with other changes before it."""
    start = state or search.state
    if start.gpu.kind != "cuda":
        return []
    found: list[Try] = []
    least: int | None = None  # label of the smallest card that fits
    for gpu in sorted(catalogue().values(), key=lambda gpu: gpu.label_bytes or 0):
        asked = gpu.name in search.rents or (search.goal == "fit" and least in (None, gpu.label_bytes))
        if not asked or not usable(gpu, start) or start.used_by_others_bytes > (gpu.memory_bytes or 0):
            continue
        config = start.config
        if search.rents:
            config = config.model_copy(update={"price_per_hour": search.rents.get(gpu.name, 0.0)})
        outcome = search.planner.outcome(replace(start, gpu=gpu, config=config))
        if outcome is not None and outcome.fits:
            found.append(search.of((*rules, "another_card"), outcome))
            least = gpu.label_bytes if least is None else least
    if not found:
        return []
    rented = [c for c in found if c.state.gpu.name in search.rents and c.outcome.money is not None]
    chosen = [min(rented, key=lambda c: c.outcome.money or 0.0)] if rented else []
    if search.goal == "fit":
        small = [c for c in found if c.state.gpu.label_bytes == least]
        chosen.append(min(small, key=lambda c: c.outcome.total_s or float("inf")))
    return list({c.state.gpu.name: c for c in chosen}.values())


# What would have saved a run that ran out of memory: the changes that leave the learning alone.

FREES_NOTHING = {"free_others", "another_card"}  # of the run's own memory


def remedies(
    config: RunConfig,
    gpu: Gpu,
    *,
    used_by_others_bytes: int = 0,
    over_bytes: int = 0,
    step: StepName = "foretrain",
    most: int = 3,
    expandable_segments: bool = True,
) -> tuple[Advice, ...]:
    """Return exact changes that fit what the card had: those of the run's own program first.

    `over_bytes`: how far the request that failed was beyond what was there; where the forecast was lower, as much is
    kept free. Tokens of a step, and the sequences of an evaluation, stay as they are.
    """
    try:
        made = plan_of(config, gpu, used_by_others_bytes=used_by_others_bytes)
        if made.available_bytes is None:
            return ()
        short_bytes = short_of(made.available_bytes, made.memory_of(step).needed_bytes, over_bytes)
        held = used_by_others_bytes + short_bytes
        found = advise(plan_of(config, gpu, used_by_others_bytes=held), step, "fit")
    except UserError:  # a card that cannot do what the config asks for
        return ()
    room = made.available_bytes
    kept = [
        advice
        for advice in found.advised
        if advice.exactness == "exact"
        and not FREES_NOTHING & set(advice.rules)
        and advice.effect.saved_bytes >= max(1, over_bytes)
        and advice.effect.needed_bytes <= room
        and (expandable_segments or "allocator_settings" not in advice.options)
    ]
    return tuple(sorted(kept, key=lambda advice: advice.step != step)[:most])


def short_of(available_bytes: int, needed_bytes: int, over_bytes: int) -> int:
    """Return the bytes by which a run that failed needed more than its forecast, at most all that there was."""
    return min(max(0, available_bytes + max(1, over_bytes) - needed_bytes), available_bytes)
