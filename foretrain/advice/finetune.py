"""What to change in fine-tuning or in generating text, each change planned: what makes it fit, faster or cheaper."""

from collections.abc import Iterable, Iterator, Sequence

from foretrain.advice.finetune_together import everything, together
from foretrain.advice.finetune_tries import MILDER, OPTIMIZERS
from foretrain.advice.record import Advice, Advices, Effect, Setting
from foretrain.advice.rules.base import Exactness, Goal
from foretrain.advice.tries import Menu, SearchedPlan, Tried, asked_of, menu_of, tokens_of, tried
from foretrain.base.errors import UserError
from foretrain.predict.finetune.plan import FineTunePlan, with_time
from foretrain.predict.inference.plan import InferencePlan

MILLION = 1_000_000
NEAREST = 3  # changes that are named where none makes the run fit
LEAST_GAIN = 0.01  # of the time or the money: a change that gains less is not advised
GOALS: tuple[Goal, ...] = ("fit", "speed", "cost")


def advise(plan: SearchedPlan, goal: Goal | None = None) -> Advices:
    """Return what to change. `goal`: None is speed where the run fits, else fit. Raises UserError for a goal that needs
    what is not known."""
    if goal and goal not in GOALS:
        raise UserError("usage.finetune_goal", goal=goal[:80], choices=GOALS)
    wanted = goal or ("speed" if plan.verdict == "fits" else "fit")
    now = effect_of(plan, plan)
    if wanted != "fit" and plan.timing is None:
        raise UserError("usage.no_time", text=f"--goal {wanted}", gpu=plan.gpu.name)
    if wanted == "cost" and not now.money:
        raise UserError("usage.no_price", text="--goal cost")
    if wanted != "fit":
        return advices(plan, _faster(plan, now, wanted), wanted, len(menu_of(plan).faster), given=goal is not None)
    steps = list(search(plan))
    return advices(plan, steps[-1], wanted, len(steps), given=goal is not None)


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


def search(plan: SearchedPlan) -> Iterator[tuple[Advice, ...]]:
    """What `changes` has found so far, after each change that was planned: for who shows them as they come."""
    alone: list[Tried] = []
    found: list[Advice] = []
    whole: Tried | None = None
    for tries in menu_of(plan).groups:
        for id in _strongest_first(tries):
            for each in (id, *MILDER.get(id, ())):
                change = tried(plan, (each,))
                alone += [change] if change else []
                fits = change is not None and change.fits
                found += [_of(plan, change)] if change and fits else []
                yield tuple(sorted(found, key=_rank))
                if each == id and not fits:
                    break
        if found:
            return
        every = everything(plan, alone)
        whole = every.whole or whole
        for change in together(plan, every):
            found += [_of(plan, change)] if change else []
            yield tuple(sorted(found, key=_rank))
        if found:
            return
    yield _nearest(plan, alone, whole)


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
