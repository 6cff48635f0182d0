"""What to change in fine-tuning or in generating text, each change planned: what makes it fit, faster or cheaper."""

from collections.abc import Iterable, Iterator, Sequence

from foretrain.advice.combine import Members, reduced
from foretrain.advice.finetune_tries import ALONE, MILDER, OPTIMIZERS
from foretrain.advice.record import Advice, Advices, Effect, Setting
from foretrain.advice.rules.base import Exactness, Goal
from foretrain.advice.tries import Menu, SearchedPlan, Tried, Tries, asked_of, menu_of, tokens_of, tried
from foretrain.base.errors import UserError
from foretrain.predict.finetune.memory import PHASES
from foretrain.predict.finetune.plan import FineTunePlan, with_time
from foretrain.predict.inference.plan import InferencePlan

MILLION = 1_000_000
NEAREST = 3  # changes that are named where none makes the run fit
LEAST_GAIN = 0.01  # of the time or the money: a change that gains less is not advised
GOALS: tuple[Goal, ...] = ("fit", "speed", "cost", "quality")


def advise(plan: SearchedPlan, goal: Goal | None = None) -> Advices:
    """Return what to change. `goal`: None is speed where the run fits, else fit. Raises UserError for a goal that needs
    what is not known."""
    choices = GOALS if menu_of(plan).better else GOALS[:-1]
    if goal and goal not in choices:
        raise UserError("usage.finetune_goal", goal=goal[:80], choices=choices)
    if goal == "quality":
        better = [planned(plan, (id,)) for id in menu_of(plan).better]
        fits = [change for change in better if change and change.effect.verdict == "fits"]
        return advices(plan, fits, goal, len(menu_of(plan).better), given=True)
    wanted = goal or ("speed" if plan.verdict == "fits" else "fit")
    now = effect_of(plan, plan)
    if wanted != "fit" and plan.timing is None:
        raise UserError("usage.no_time", text=f"--goal {wanted}", gpu=plan.gpu.name)
    if wanted == "cost" and not now.money:
        raise UserError("usage.no_price", text="--goal cost")
    if wanted != "fit":
        return advices(plan, _faster(plan, now, wanted), wanted, len(menu_of(plan).faster), given=goal is not None)
    tries = Tries(plan)
    *_, found = search(plan, tries)
    return advices(plan, found, wanted, tries.planned, given=goal is not None)


def advices(
    plan: SearchedPlan, found: Sequence[Advice], goal: Goal = "fit", planned: int = 0, *, given: bool = False
) -> Advices:
    """Return these changes as the record that any advice is. `planned`: how many were tried; `given`: the user set the
    goal."""
    fitting = tuple(each for each in found if each.effect.verdict == "fits")
    return Advices(
        name=plan.name, goal=goal, goal_given=given, step=None, gpu=plan.gpu.name,
        used_by_others_bytes=plan.used_by_others_bytes, tokens_per_step=tokens_of(plan),
        now=effect_of(plan, plan), advised=fitting, partial=() if fitting else tuple(found),
        useless=(), planned=planned or len(found), nothing_fits=plan.verdict != "fits" and not fitting,
    )  # fmt: skip


def _faster(plan: SearchedPlan, now: Effect, goal: Goal) -> tuple[Advice, ...]:
    """The fastest first, or the cheapest: those after which the same is learned, then the others."""

    def gain(change: Advice) -> float:
        then = change.effect
        if goal == "speed":
            return then.slower or 0.0
        same = change.keeps_tokens_per_step or then.total_s is not None or isinstance(plan, InferencePlan)
        return then.money / now.money - 1 if same and then.money and now.money else 0.0

    found = [change for id in menu_of(plan).faster if (change := planned(plan, (id,)))]
    worth = [each for each in found if each.effect.verdict == "fits" and gain(each) < -LEAST_GAIN]
    return tuple(sorted(worth, key=lambda change: (*_last(change), gain(change))))


def changes(plan: SearchedPlan) -> tuple[Advice, ...]:
    """The changes that make a run fit, best first; where nothing fits, what comes nearest. Those that train something
    else are looked at where none of the others fits, alone or together."""
    return list(search(plan))[-1]


def search(plan: SearchedPlan, tries: Tries | None = None) -> Iterator[tuple[Advice, ...]]:
    """What `changes` has found so far, after each change that was planned: for who shows them as they come."""
    tries = tries or Tries(plan)
    alone: list[Tried] = []
    found: list[Advice] = []
    whole: Tried | None = None
    for group in tries.menu.groups:
        for id in _strongest_first(group):
            for each in (id, *MILDER.get(id, ())):
                change = tries.outcome((each,))
                alone += [change] if change else []
                fits = change is not None and change.fits
                found += [_of(plan, change)] if change and fits else []
                yield tuple(sorted(found, key=_rank))
                if each == id and not fits:
                    break
        if found:
            return
        starts = [members for members in _strongest(tries, alone) if len(members) > 1]
        every = [made for members in starts if (made := tries.outcome(members))]
        best = min(every, key=lambda made: (not made.fits, made.needed_bytes)) if every else None
        whole = best or whole
        if best and best.fits:
            yield _together(tries, best.ids, alone)
            return
    yield _nearest(plan, alone, whole)


def _together(tries: Tries, members: Members, alone: Sequence[Tried]) -> tuple[Advice, ...]:
    """The sets that fit and have no other in them, of two ways down: without the most expensive first, and without
    what saves least."""
    one = {change.ids[0]: change for change in alone}
    ranks = {id: _rank(_of(tries.plan, change)) for id, change in one.items()}

    def kept(ids: Members, cut: bool) -> Tried | None:
        return made if (made := tries.outcome(ids)) and made.fits else None

    def milder(id: str) -> Sequence[str]:
        """What costs less in a change's place, and what does less."""
        rivals = [other for other in one if one[other].clashes(one[id]) and ranks[other] < ranks[id]]
        return (*rivals, *MILDER.get(id, ()))

    costliest = tuple(sorted(members, key=lambda id: ranks[id], reverse=True))
    weakest = tuple(sorted(members, key=lambda id: -one[id].needed_bytes))
    made = {each.ids: each for by in (costliest, weakest) for each in reduced(by, kept, milder)}
    found = sorted((_of(tries.plan, each) for each in made.values()), key=_rank)
    smallest = [each for each in found if not any(set(other.rules) < set(each.rules) for other in found)]
    if len(smallest) == 1:  # another way: something else in the place of one of its changes, such as another loop
        ids = smallest[0].rules
        rivals = ((id, other) for id in ids if id in one for other in one if one[other].clashes(one[id]))
        swaps = (tuple(other if each == id else each for each in ids) for id, other in rivals if other not in ids)
        other_way = next((each for swap in swaps if (each := kept(swap, False))), None)
        smallest += [_of(tries.plan, other_way)] if other_way else []
    return tuple(sorted(smallest, key=_rank))


def _strongest(tries: Tries, alone: Sequence[Tried]) -> list[Members]:
    """All that saves memory in a phase, and all of it that costs none in another. Of changes that set the same option
    the last is strongest."""
    before = _phases(tries.plan)
    beside = [change for change in alone if change.ids[0] not in ALONE]
    effects = {each.ids: [now - size for now, size in zip(_phases(each.plan), before, strict=True)] for each in beside}
    helpful = [each for each in beside if min(effects[each.ids]) < 0]
    starts: list[Members] = []
    for some in (helpful, [each for each in helpful if max(effects[each.ids]) <= 0]):
        found: list[Tried] = []
        for change in some:
            found = [*(each for each in found if not each.clashes(change) and not each.is_part_of(change)), change]
        starts.append(tuple(each.ids[0] for each in found))
    return starts


def _phases(plan: SearchedPlan) -> list[int]:
    """Bytes of tensors in each phase. Preparing and merging are of adapters alone: 0 without."""
    sizes = {phase.phase: phase.allocated_bytes for phase in plan.memory.phases}
    return [sizes.get(name, 0) for name in PHASES]


def _strongest_first(tries: Iterable[str]) -> list[str]:
    """The changes but those that are milder than another of them."""
    milder = {id for each in MILDER.values() for id in each}
    return [id for id in tries if id not in milder]


def _nearest(plan: SearchedPlan, alone: Sequence[Tried], whole: Tried | None) -> tuple[Advice, ...]:
    """What comes nearest of single changes and of all together, `whole`: tight ones, then those that need least."""
    every = (*alone, *([whole] if whole else []))
    saving = [change for change in every if change.plan.needed_bytes < plan.needed_bytes]
    nearest = sorted(saving, key=lambda change: (change.plan.verdict != "tight", change.plan.needed_bytes))
    return tuple(_of(plan, change) for change in nearest[:NEAREST])


def planned(plan: SearchedPlan, ids: tuple[str, ...]) -> Advice | None:
    """The plan with these changes; None where one of them changes nothing, or the model cannot have it."""
    change = tried(plan, ids)
    return _of(plan, change) if change else None


def _of(plan: SearchedPlan, change: Tried) -> Advice:
    """What a change comes to. How often an optimizer pages, and so what it takes, nobody can say."""
    paged = str(change.changed.get("optim", "")).startswith("paged")
    other = change.plan
    if isinstance(plan, FineTunePlan) and isinstance(other, FineTunePlan) and plan.timing and not paged:
        other = with_time(other, plan)
    tokens, effect, menu = (tokens_of(plan), tokens_of(other)), effect_of(plan, other), menu_of(plan)
    return Advice(
        rules=change.ids, step=None, gpu=plan.gpu.name, used_by_others_bytes=plan.used_by_others_bytes,
        settings=tuple(
            Setting(option=name, before=getattr(asked_of(plan), name), after=value, ours=False)
            for name, value in change.changed.items()
        ),
        exactness=_exactness(change, menu), tokens_per_step=tokens[1], keeps_tokens_per_step=tokens[0] == tokens[1],
        effect=effect, price=effect.slower or 0.0,
    )  # fmt: skip


def effect_of(now: SearchedPlan, then: SearchedPlan) -> Effect:
    """Return what a change does: time for a token; of generating text that of each text, and money of a million."""
    if isinstance(then, FineTunePlan):
        return Effect.of(now, then, for_a_token=True)
    found = Effect.of(now, then, for_a_token=False)
    money = found.money and found.money * MILLION / tokens_of(then)
    return found.model_copy(update={"money": money})


def _exactness(change: Tried, menu: Menu) -> Exactness:
    """What the learning makes of it."""
    found = {id for id in change.ids if id in menu.other}
    return "exact" if not found else "other optimizer" if found <= OPTIMIZERS else "other model"


def _last(change: Advice) -> tuple[bool, bool]:
    """Return what puts a change behind others: it needs more cards, or the result is another."""
    return "world" in change.options, change.learns_otherwise


def _rank(change: Advice) -> tuple[object, ...]:
    """Of changes that fit. One that gives up what an evaluation measures comes after those that do not."""
    return *_last(change), "loss_alone" in change.rules, len(change.rules), change.effect.slower or 0.0
