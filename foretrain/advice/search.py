"""A search for advice, of any kind of run: what is tried, what it comes to beside the run as it is, and the answer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretrain.advice.planner import Outcome, Planner
from foretrain.advice.record import Advice, Advices, Cards, Effect, Setting, Way
from foretrain.advice.rules.base import Change, Exactness, Goal, Rule, State, loosest
from foretrain.base.errors import UserError
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.plan import Plan, no_time
from foretrain.predict.ranks import ClusterPlan

AnyPlan = Plan | ClusterPlan | FineTunePlan | InferencePlan
Members = tuple[str, ...]
WORTH = 0.01  # less than so much of the need or of the time is nothing


@dataclass(frozen=True)
class Try:
    """Rules applied to a run, and the run after them. `options`: the values that they set."""

    rules: Members
    outcome: Outcome
    exactness: Exactness
    options: Mapping[str, Any]

    @property
    def state(self) -> State:
        return self.outcome.state

    @property
    def fits(self) -> bool:
        return self.outcome.fits

    @property
    def needed_bytes(self) -> int:
        return self.outcome.needed_bytes

    def buys(self, now: State) -> bool:
        """Whether it needs another card, more of them, or another link."""
        before, after = now.cluster, self.state.cluster
        if before is None or after is None:
            return self.state.gpu.name != now.gpu.name
        return after.world > before.world or (after.link != before.link and after.world > 1)


@dataclass(frozen=True)
class Search:
    """What stays the same while advice is looked for. `price_of`: docs/advice.md says what it is; `order_of`: a key
    that sorts; `rents`: of other cards, by name."""

    planner: Planner
    base: Outcome
    goal: Goal
    rules: Mapping[str, Rule]
    price_of: Callable[["Search", Try], float]
    order_of: Callable[["Search", Try], Any]
    rents: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def state(self) -> State:
        return self.base.state

    @property
    def must_fit(self) -> bool:
        return not self.base.fits

    def price(self, tried: Try) -> float:
        return self.price_of(self, tried)

    def order(self, tried: Try) -> Any:
        return self.order_of(self, tried)

    def metric(self, outcome: Outcome) -> float | None:
        """What the goal wants little of; of several cards for a token, as they may train on more of them."""
        if self.state.cluster:
            money = outcome.money and outcome.money / outcome.state.tokens_per_step
            return money if self.goal == "cost" else outcome.token_s
        return {"fit": outcome.step_s, "cost": outcome.money}.get(self.goal, outcome.total_s)

    def ratio(self, outcome: Outcome) -> float | None:
        """The metric over that of now, minus 1."""
        now, then = self.metric(self.base), self.metric(outcome)
        return then / now - 1 if now and then is not None else None

    def saved(self, outcome: Outcome) -> int:
        return self.base.needed_bytes - outcome.needed_bytes

    def saves(self, outcome: Outcome) -> bool:
        return self.saved(outcome) >= WORTH * self.base.needed_bytes

    def made(self, rules: Members, change: Change, start: State) -> Try | None:
        """A try of rules whose changes together are `change`; None where the config would be refused."""
        outcome = self.planner.outcome(change.applied(start))
        return self.of(rules, outcome) if outcome else None

    def of(self, rules: Members, outcome: Outcome, options: Mapping[str, Any] | None = None) -> Try:
        """A try of a planned run. `options`: that the rules set, in pretraining those that differ."""
        now = self.base.state
        found: list[Exactness] = [self.rules[rule].exactness_on(now) for rule in rules]
        # Sharded weights are gathered in half precision, whole ones are autocast.
        if outcome.shards != self.base.shards and self.state.half:
            found.append("rounding")
        if options is None:
            options = changed(self.state.config, outcome.state.config)
        return Try(rules, outcome, loosest(found), options)

    # -- records -------------------------------------------------------------------------------------------------------

    def effect(self, outcome: Outcome) -> Effect:
        return Effect.of(self.base, outcome)

    def advice(self, tried: Try) -> Advice:
        now, then = self.base.state, tried.outcome.state
        return Advice(
            rules=tried.rules, settings=tuple(_setting(now.config, *each) for each in tried.options.items()),
            step=then.step, gpu=then.gpu.name, used_by_others_bytes=then.used_by_others_bytes,
            exactness=tried.exactness, tokens_per_step=then.tokens_per_step,
            keeps_tokens_per_step=then.tokens_per_step == now.tokens_per_step,
            effect=self.effect(tried.outcome), price=round(self.price(tried), 4), shared=self._cards(tried),
        )  # fmt: skip

    def _cards(self, tried: Try) -> Cards | None:
        rank = tried.outcome.rank
        if rank is None or (cluster := tried.state.cluster) is None:
            return None
        return Cards(
            cards=cluster.world, nodes=cluster.nodes, text=cluster.text, link=cluster.link.name, way=Way.of(rank),
            speed_up=rank.speed_up, buys=tried.buys(self.state),
        )  # fmt: skip

    def answer(self, plan: AnyPlan, goal: Goal | None, advised: Iterable[Advice], **other: Any) -> Advices:
        now, advised = self.base.state, tuple(advised)
        other = {"partial": (), "useless": (), **other}
        return Advices(
            name=plan.name, goal=self.goal, goal_given=goal is not None, step=now.step, gpu=now.gpu.name,
            used_by_others_bytes=now.used_by_others_bytes, tokens_per_step=now.tokens_per_step,
            now=self.effect(self.base), advised=advised, planned=self.planner.planned,
            nothing_fits=self.must_fit and not advised, **other,
        )  # fmt: skip


def changed(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    values = ((name, getattr(after, name)) for name in OPTIONS)
    return {name: value for name, value in values if value != getattr(before, name)}


def _setting(before: Any, option: str, after: Any) -> Setting:
    ours = isinstance(before, RunConfig) and OPTIONS[option].ours
    return Setting(option=option, before=getattr(before, option), after=after, ours=ours)


def goal_of(plan: AnyPlan, base: Outcome, goal: Goal | None) -> Goal:
    """Return fit if the run does not fit or its speed is unknown, else speed, where none is given. Raises UserError."""
    wanted = goal or ("speed" if base.fits and base.timing else "fit")
    if wanted == "fit" and base.available_bytes is None:
        raise UserError("usage.advise_memory", gpu=plan.gpu.name)
    if wanted != "fit" and base.timing is None:
        raise no_time(plan, f"--goal {wanted}")
    if wanted == "cost" and not base.money:
        raise UserError("usage.no_price", text="--goal cost")
    return wanted


def reduced(
    members: Members,
    kept: Callable[[Members, bool], Try | None],
    milder: Callable[[str], Sequence[str]] = lambda rule: (),
    cuts: tuple[bool, ...] = (False,),
) -> list[Try]:
    """Return the sets on the way down from one that fits; the last needs all its members. `members`: as they are left
    out. `kept`: a set where it fits, with a smaller micro-batch (`cuts`) if need be. `milder`: what does less, the
    strongest first."""
    found: list[Try] = []

    def keep(tried: Members, *, cut: bool) -> bool:
        made = kept(tried, cut)
        found.extend([made] if made else [])
        return made is not None

    keep(members, cut=cuts[-1])
    for cut in cuts:
        left = members
        for change in members:
            if change not in left:
                continue
            without = tuple(member for member in left if member != change)
            for weaker in milder(change):
                if keep((*without, weaker), cut=cut):
                    left = (*without, weaker)
                    without = tuple(member for member in left if member != weaker)
            if keep(without, cut=cut):
                left = without
    return found


def smallest_sets(
    search: Search,
    orders: Iterable[Members],
    kept: Callable[[Members, bool], Try | None],
    milder: Callable[[str], Sequence[str]] = lambda rule: (),
) -> list[Try]:
    """Return the sets that fit and have no other in them, best first. `orders`: in which members are left out."""
    made = {each.rules: each for members in orders for each in reduced(members, kept, milder)}
    found = sorted(made.values(), key=search.order)
    return [each for each in found if not any(set(other.rules) < set(each.rules) for other in found)]
