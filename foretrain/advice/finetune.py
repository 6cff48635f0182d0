"""What to change in fine-tuning or in generating text, each change planned: what makes it fit, faster or cheaper."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from foretrain.advice.planner import Count, Outcome, Planner
from foretrain.advice.record import Advice, Advices, slowdown
from foretrain.advice.rules.base import Goal, PlannedState, Rule
from foretrain.advice.rules.finetuning import TUNING
from foretrain.advice.rules.generation import GENERATING
from foretrain.advice.search import WORTH, Members, Search, Try, goal_of, smallest_sets
from foretrain.base.errors import UserError
from foretrain.predict.finetune.memory import PHASES, estimated
from foretrain.predict.finetune.plan import FineTunePlan, bounded, check_exact, retuned, time_of, untimed
from foretrain.predict.inference.plan import InferencePlan, replanned
from foretrain.predict.memory import RunMemory
from foretrain.predict.timing import Timing

SearchedPlan = FineTunePlan | InferencePlan
Values = dict[str, Any]
NEAREST = 3  # changes that are named where none makes the run fit
ALONE = "sixteen_bits"  # beside others four bits take less


def advise(plan: SearchedPlan, goal: Goal | None = None) -> Advices:
    """Return what to change. Raises UserError for a goal that needs what is not known."""
    if isinstance(plan, FineTunePlan):
        check_exact(plan, "foretrain advise")
    search = search_of(plan, goal)
    if search.goal == "fit":
        *_, found = fitting(search)
        return _answer(plan, search, goal, [search.advice(each) for each in found])
    kinds = ("quality",) if search.goal == "quality" else ("speed", "both")
    made = [together(search, (rule.id,)) for rule in search.rules.values() if rule.kind in kinds]
    found = [search.advice(each) for each in made if each and each.fits]
    if search.goal != "quality":
        gains = {each.rules: _gain(search, each) for each in found}
        found = [each for each in found if gains[each.rules] < -WORTH]
        found.sort(key=lambda each: ("world" in each.options, each.learns_otherwise, gains[each.rules]))
    return _answer(plan, search, goal, found)


def _gain(search: Search, change: Advice) -> float:
    """Of the time or the money, below 0 where that is less."""
    now, then = search.base.money, change.effect.money
    return (change.effect.slower or 0.0) if search.goal == "speed" else then / now - 1 if now and then else 0.0


def _answer(plan: SearchedPlan, search: Search, goal: Goal | None, found: Sequence[Advice]) -> Advices:
    fitting = [each for each in found if each.effect.verdict == "fits"]
    return search.answer(plan, goal, fitting, partial=() if fitting else tuple(found))


def advices(plan: SearchedPlan, found: Sequence[Advice]) -> Advices:
    return _answer(plan, search_of(plan, "fit"), None, found).model_copy(update={"planned": len(found)})


def search_of(plan: SearchedPlan, goal: Goal | None) -> Search:
    """Raises UserError as `advise` does."""
    rules = TUNING if isinstance(plan, FineTunePlan) else GENERATING
    choices: tuple[Goal, ...] = ("fit", "speed", "cost", *(["quality"] if rules is TUNING else []))
    if goal == "quality" not in choices:
        raise UserError("usage.generation_quality")
    if goal and goal not in choices:
        raise UserError("usage.finetune_goal", goal=goal[:80], choices=choices)
    base = _planned(plan)
    wanted: Goal = "quality" if goal == "quality" else goal_of(plan, base, goal)
    return Search(
        Planner(lambda options, count: _outcome(plan, dict(options), count)), base, wanted, rules, _price, _best_first
    )


def _outcome(plan: SearchedPlan, options: Values, count: Count) -> Outcome | None:
    """The run with other options; None where this model or card cannot have them. How often an optimizer pages, and so
    what it takes, nobody can say."""
    try:
        made = _planned(replanned(plan, **options)) if isinstance(plan, InferencePlan) else _tuned(plan, options)
    except UserError:
        return None
    count(tuple(options.items()))
    return made


def _planned(plan: SearchedPlan) -> Outcome:
    config = plan.tune if isinstance(plan, FineTunePlan) else plan.asked
    tensors = {phase.phase: phase.tensors_bytes for phase in plan.memory.phases}
    return Outcome(PlannedState(plan, config), plan.memory, plan.available_bytes, lambda: plan.timing, tensors=tensors)


def _tuned(plan: FineTunePlan, options: Values) -> Outcome:
    """A fine-tuning run, whose tensors go through the allocator when somebody asks for more than them."""
    tune, room = retuned(plan, **options), plan.available_bytes
    timed = plan.timing is not None and not str(options.get("optim", "")).startswith("paged")

    def time() -> Timing | None:
        return time_of(plan, tune) if timed else None

    if plan.facts is None:
        return replace(_planned(untimed(plan, **options)), timed=time)
    estimate = estimated(plan.facts, tune, plan.gpu)
    tensors = {name: peak.nbytes for name, peak in estimate.peaks.items()}

    def memory() -> RunMemory:
        return bounded(estimate.judged(room, plan.gpu.memory_bytes), plan.bound)

    return Outcome(PlannedState(plan, tune), memory, room, time, tensors=tensors)


def together(search: Search, ids: Members) -> Try | None:
    """The run with these rules, each as it is of the run as it stands; None where one of them changes nothing, or this
    model cannot have it, such as modules that its layers are not called."""
    plan, options = _plan(search), Values()
    ids = tuple(id for id in search.rules if id in ids)
    for id in ids:
        changes = search.rules[id].changes(plan)
        if not changes:
            return None
        values = changes[0].options
        other = {name for name, value in values.items() if getattr(search.base.state.config, name) != value}
        kept = other | {"amp"} if "method" in other else other  # which another method has otherwise
        options |= {name: value for name, value in values.items() if name in kept}
    if options.get("amp") == "bf16" and not plan.gpu.supports_bf16:
        options["amp"] = "fp16"
    outcome = search.planner.outcome(tuple(options.items()))
    return search.of(ids, outcome, options) if outcome else None


def _plan(search: Search) -> SearchedPlan:
    assert isinstance(search.base.state, PlannedState)
    return search.base.state.plan


def changes(plan: SearchedPlan) -> tuple[Advice, ...]:
    """The changes that make a run fit, best first; where nothing fits, what comes nearest. Those that train something
    else are looked at where none of the others fits, alone or together."""
    return list(searched(plan))[-1]


def searched(plan: SearchedPlan) -> Iterator[tuple[Advice, ...]]:
    """What `changes` has found so far, after each change that was planned: for who shows them as they come."""
    search = search_of(plan, "fit")
    return (tuple(search.advice(each) for each in found) for found in fitting(search))


def fitting(search: Search) -> Iterator[list[Try]]:
    """What makes the run fit, found so far: single changes of a tier, the first that has any, or several together."""
    alone: dict[str, Try] = {}
    found: list[Try] = []
    whole: Try | None = None
    for tier in _tiers(search):
        for rule in tier:
            for id in (rule.id, *rule.milder):
                made = together(search, (id,))
                if made:
                    alone[id] = made
                found += [made] if made and made.fits else []
                yield sorted(found, key=search.order)
                if id == rule.id and not (made and made.fits):
                    break
        if found:
            return
        starts = [members for members in _strongest(search, alone) if len(members) > 1]
        every = [made for members in starts if (made := together(search, members))]
        best = min(every, key=lambda made: (not made.fits, made.needed_bytes), default=None)
        whole = best or whole
        if best and best.fits:
            yield _sets(search, best.rules, alone)
            return
    yield _nearest(search, [*alone.values(), *([whole] if whole else [])])


def _tiers(search: Search) -> list[list[Rule]]:
    """The rules that save memory, but for those that are milder than another: of training first those after which the
    same is learned."""
    milder = {id for rule in search.rules.values() for id in rule.milder}
    rules = [rule for rule in search.rules.values() if rule.kind in ("memory", "both") and rule.id not in milder]
    if search.rules is not TUNING:
        return [rules]
    return [[rule for rule in rules if (rule.exactness == "exact") is exact] for exact in (True, False)]


def _sets(search: Search, members: Members, alone: Mapping[str, Try]) -> list[Try]:
    """The sets that fit and have no other in them, of two ways down: without the most expensive first, and without
    what saves least."""

    def kept(ids: Members, cut: bool = False) -> Try | None:
        return made if (made := together(search, ids)) and made.fits else None

    def rivals(id: str) -> list[str]:
        return [other for other in alone if _clash(search, alone[other], alone[id])] if id in alone else []

    def milder(id: str) -> Sequence[str]:
        """What costs less in a change's place, and what does less."""
        cheaper = [other for other in rivals(id) if search.order(alone[other]) < search.order(alone[id])]
        return (*cheaper, *search.rules[id].milder)

    costliest = sorted(members, key=lambda id: search.order(alone[id]), reverse=True)
    weakest = sorted(members, key=lambda id: -alone[id].outcome.least_bytes)
    smallest = smallest_sets(search, [tuple(costliest), tuple(weakest)], kept, milder)
    if len(smallest) == 1:  # another way: something else in the place of one of its changes, such as another loop
        ids = smallest[0].rules
        swaps = ((id, other) for id in ids for other in rivals(id) if other not in ids)
        others = (kept(tuple(other if each == id else each for each in ids)) for id, other in swaps)
        smallest += islice(filter(None, others), 1)
    return sorted(smallest, key=search.order)


def _clash(search: Search, one: Try, other: Try) -> bool:
    """Whether both set an option, to different values, or one leaves the other nothing to do."""
    pairs = ((a, b) for a in one.rules for b in other.rules)
    if any(a in search.rules[b].instead_of or b in search.rules[a].instead_of for a, b in pairs):
        return True
    return any(other.options.get(option, value) != value for option, value in one.options.items())


def _strongest(search: Search, alone: Mapping[str, Try]) -> list[Members]:
    """All that saves memory in a phase, and all of it that costs none in another. Of changes that set the same option
    the last is strongest."""
    before, beside = _phases(search.base), [made for id, made in alone.items() if id != ALONE]
    effects = {
        each.rules: [now - size for now, size in zip(_phases(each.outcome), before, strict=True)] for each in beside
    }
    helpful = [each for each in beside if min(effects[each.rules]) < 0]
    starts: list[Members] = []
    for some in (helpful, [each for each in helpful if max(effects[each.rules]) <= 0]):
        found: list[Try] = []
        for change in some:
            kept = [each for each in found if not _clash(search, each, change)]
            found = [*(each for each in kept if not each.options.items() <= change.options.items()), change]
        starts.append(tuple(each.rules[0] for each in found))
    return starts


def _phases(outcome: Outcome) -> list[int]:
    """Bytes of tensors in each phase. Preparing and merging are of adapters alone: 0 without."""
    return [outcome.tensors.get(name, 0) for name in PHASES]


def _nearest(search: Search, tries: Sequence[Try]) -> list[Try]:
    """What comes nearest of single changes and of all together: tight ones, then those that need least."""
    saving: list[Try] = []
    for each in sorted(tries, key=lambda each: each.outcome.least_bytes):
        nearer = [other for other in saving if other.needed_bytes <= each.outcome.least_bytes]
        if each.outcome.hopeless and len(nearer) >= NEAREST:
            break
        saving += [each] if search.saved(each.outcome) > 0 else []
    return sorted(saving, key=lambda each: (each.outcome.verdict != "tight", each.needed_bytes))[:NEAREST]


def _price(search: Search, tried: Try) -> float:
    return slowdown(search.base, tried.outcome) or 0.0


def _best_first(search: Search, tried: Try) -> tuple[object, ...]:
    """More cards come last, then what learns otherwise, then what gives up what an evaluation measures."""
    toll = sum(search.rules[id].toll for id in tried.rules)
    return "world" in tried.options, tried.exactness != "exact", toll, len(tried.rules), search.price(tried)
