"""What is compared while advice is looked for: a change with its plan, its exactness and its price.

Price: what a change costs, as a share of the run's time. The step's slowdown (or the whole run's, or its money, as the
goal asks), and on top what each exactness and rule is taken to be worth: a change that rounds otherwise counts as 5 %
of the time, another optimizer as 50 %, another model as the whole time and as the share of its parameters and context
that is given up, another card as one and a half, each change after the first as 1 %. That a smaller model or a larger
card is faster is not counted for it; but where cost is the goal, a rented card costs its rent alone. These are a
choice, not a measurement; docs/advice.md says so.
"""

from dataclasses import dataclass
from typing import Any

from foretrain.advice.planner import Outcome, Planner
from foretrain.advice.record import Advice, Cards, Effect, Setting, Way
from foretrain.advice.rules import BY_ID, ORDER
from foretrain.advice.rules.base import Change, Exactness, Goal, State, loosest
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.shape import ModelShape

TOLLS: dict[Exactness, float] = {
    "exact": 0.0, "rounding": 0.05, "other tokens": 0.5, "other optimizer": 0.5, "other model": 1.0,
}  # fmt: skip
EACH_MORE = 0.01
WORTH = 0.01  # less than so much of the need or of the time is nothing
UNTIMED = 0.3  # slowdown that is taken where nothing is known of the card's speed


@dataclass(frozen=True)
class Candidate:
    """Rules applied one after another, and the plan of the run after them."""

    rules: tuple[str, ...]
    outcome: Outcome
    exactness: Exactness

    @property
    def state(self) -> State:
        return self.outcome.state

    def buys(self, now: State) -> bool:
        """Whether it needs another card, more of them, or another link."""
        before, after = now.cluster, self.state.cluster
        if before is None or after is None:
            return self.state.gpu.name != now.gpu.name
        return after.world > before.world or (after.link != before.link and after.world > 1)


@dataclass
class Search:
    """What stays the same while advice is looked for."""

    planner: Planner
    base: Outcome
    goal: Goal
    rents: dict[str, float]
    traced: bool = False

    @property
    def state(self) -> State:
        return self.base.state

    @property
    def must_fit(self) -> bool:
        """Whether the run as it is does not fit with its margin."""
        return not self.base.fits

    def metric(self, outcome: Outcome) -> float | None:
        """What the goal wants little of; of several cards for a token, as they may train on more of them."""
        if self.state.cluster:
            money = outcome.money and outcome.money / outcome.state.config.tokens_per_step
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

    def makes_room(self, candidate: Candidate) -> bool:
        """Whether it takes less than now, or is given more."""
        state, here = candidate.state, candidate.outcome
        given = state.gpu.name != self.state.gpu.name or state.used_by_others_bytes < self.state.used_by_others_bytes
        takes = here.needed_bytes if here.available_bytes is None else min(here.needed_bytes, here.available_bytes)
        return given or takes < self.base.needed_bytes

    def price(self, candidate: Candidate) -> float:
        """See the head of the module; where all fits already and memory is the goal, what is saved counts for it."""
        ratio = self.ratio(candidate.outcome)
        price = (UNTIMED if ratio is None else ratio) + TOLLS[candidate.exactness]
        gpu = candidate.state.gpu.name
        if self.goal == "cost" and gpu in self.rents and gpu != self.state.gpu.name:
            return price + EACH_MORE * (len(candidate.rules) - 1)  # its money is all that it costs
        if candidate.exactness == "other model" or gpu != self.state.gpu.name:
            price = max(0.0, price - TOLLS[candidate.exactness]) + TOLLS[candidate.exactness]
            price += given_up(self.state.config, candidate.state.config)
        price += sum(BY_ID[rule].toll for rule in candidate.rules) + EACH_MORE * (len(candidate.rules) - 1)
        if self.goal == "fit" and not self.must_fit:
            price -= self.saved(candidate.outcome) / self.base.needed_bytes
        return price

    def order(self, candidate: Candidate) -> tuple[bool, float, int]:
        """The least price first; of equal ones, what users can afford first. What has to be bought comes last, unless
        the goal is cost and what it costs was said."""
        bought = candidate.buys(self.state) and self.goal != "cost"
        return bought, round(self.price(candidate), 3), ORDER[candidate.rules[-1]]

    def made(self, rules: tuple[str, ...], change: Change, start: State) -> Candidate | None:
        """A candidate from rules whose changes together are `change`; None where the config would be refused."""
        outcome = self.planner.outcome(change.applied(start))
        return self.of(rules, outcome) if outcome else None

    def of(self, rules: tuple[str, ...], outcome: Outcome) -> Candidate:
        found: list[Exactness] = [BY_ID[rule].exactness_on(self.state) for rule in rules]
        # Sharded weights are gathered in half precision, whole ones are autocast.
        if outcome.shards != self.base.shards and self.state.half:
            found.append("rounding")
        return Candidate(rules, outcome, loosest(found))

    # -- records ---------------------------------------------------------------------------------------------------

    def effect(self, outcome: Outcome) -> Effect:
        """The record of a plan beside that of now; with several cards for a token."""
        return Effect.of(self.base, outcome, for_a_token=self.state.cluster is not None)

    def advice(self, candidate: Candidate) -> Advice:
        state, config = candidate.state, self.state.config
        return Advice(
            rules=candidate.rules, settings=settings(config, state.config), step=state.step, gpu=state.gpu.name,
            used_by_others_bytes=state.used_by_others_bytes, exactness=candidate.exactness,
            tokens_per_step=state.config.tokens_per_step,
            keeps_tokens_per_step=state.config.tokens_per_step == config.tokens_per_step,
            effect=self.effect(candidate.outcome), price=round(self.price(candidate), 4), shared=self._cards(candidate),
        )  # fmt: skip

    def _cards(self, candidate: Candidate) -> Cards | None:
        cluster, rank = candidate.state.cluster, candidate.outcome.rank
        if cluster is None or rank is None:
            return None
        return Cards(
            cards=cluster.world, nodes=cluster.nodes, text=cluster.text, link=cluster.link.name, way=Way.of(rank),
            speed_up=rank.speed_up, buys=candidate.buys(self.state),
        )  # fmt: skip


def given_up(before: RunConfig, after: RunConfig) -> float:
    """The share of parameters, and of context, that a smaller model has less."""
    params = ModelShape.of(after).n_params / ModelShape.of(before).n_params
    return max(0.0, 1 - params) + max(0.0, 1 - after.block_size / before.block_size)


def settings(before: RunConfig, after: RunConfig) -> tuple[Setting, ...]:
    found: list[Setting] = []
    for name, knob in OPTIONS.items():
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            found.append(Setting(option=name, before=old, after=new, ours=knob.ours))
    return tuple(found)


def to_set(found: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Those that somebody has to set: GPT-2's weights bring their own shape."""
    brings = GPT2_SHAPES.get(next((str(s.after) for s in found if s.option == "init_from"), ""), {})
    return tuple(setting for setting in found if setting.option not in brings)


def with_settings(config: RunConfig, found: tuple[Setting, ...]) -> RunConfig:
    update: dict[str, Any] = {setting.option: setting.after for setting in found}
    return config.model_copy(update=update)
