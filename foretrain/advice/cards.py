"""Of several cards: what each takes of a run, and which that fits is the cheapest, the fastest, the least in energy."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.base.records import Record
from foretrain.config.finetune.options import FineTune
from foretrain.config.options import RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.finetuning import of_plan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import Verdict
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.timing import Prices, Spending
from foretrain.predict.within import within

MILLION = 1_000_000


class Choice(Record):
    """Names of cards; None where no card that fits has the figure. `mixed_prices`: some are rented, some are not."""

    cheapest: str | None
    fastest: str | None
    least_energy: str | None
    mixed_prices: bool

    def marks(self, name: str) -> tuple[str, ...]:
        return tuple(field for field in ("cheapest", "fastest", "least_energy") if getattr(self, field) == name)


class Candidate(NamedTuple):
    """A card that is compared. `duration_s`: of a run, or of a step of the same tokens on each card."""

    name: str
    verdict: Verdict | None
    rented: bool
    duration_s: float | None = None
    money: float | None = None
    energy_j: float | None = None

    @classmethod
    def of(cls, plan: AnyPlan) -> "Candidate":
        """With what it spends; of a card whose speed is not known, nothing."""
        spent = plan.timing
        prices = Prices.of(plan.config) if isinstance(plan, Plan) else spent and spent.prices
        rented = bool(prices and prices.price_per_hour)
        if spent is None:
            return cls(plan.gpu.name, plan.verdict, rented)
        money, duration_s = spent.money(), spent.length_s.expected_s
        return cls(
            plan.gpu.name, plan.verdict, rented, duration_s, money[1] if money else None, spent.energy_expected_j
        )


def chosen(cards: Sequence[Candidate]) -> Choice:
    """The best of the cards whose memory is enough; a tight one counts only if none fits."""
    fitting = [card for card in cards if card.verdict == "fits"]
    fitting = fitting or [card for card in cards if card.verdict == "tight"]

    def least(figure: Callable[[Candidate], float | None]) -> str | None:
        known = [(value, card.name) for card in fitting if (value := figure(card)) is not None]
        return min(known)[1] if known else None

    return Choice(
        cheapest=least(lambda card: card.money), fastest=least(lambda card: card.duration_s),
        least_energy=least(lambda card: card.energy_j), mixed_prices=len({card.rented for card in cards}) > 1,
    )  # fmt: skip


class ComparedCard(Record):
    """A card. `tokens`: that its figures are of; None, and no figures, where the card's speed is not known or a limit
    is too small for one step. `epochs`: as passes over the data, where the tokens of those are known."""

    name: str
    verdict: Verdict | None
    needed_bytes: int
    available_bytes: int | None
    tokens_per_s: float | None = None
    tokens: int | None = None
    epochs: float | None = None
    duration_s: float | None = None
    energy_j: float | None = None
    cost: float | None = None
    co2_g: float | None = None


class ComparedCards(Record):
    """What is shown of several cards. `of`: the whole run, a million tokens, or what fits in a limit. `best` goes by
    the tokens that all of them train. `cost`: a card's rent, else its electricity, in `currency`."""

    of: Literal["run", "million", "limit"]
    limit: Limit | None
    currency: str
    cards: tuple[ComparedCard, ...]
    best: Choice


def compared(plans: Sequence[AnyPlan], limit: Limit | None = None) -> ComparedCards:
    """The cards beside each other. Raises UserError where nobody can say what the limit is of any of them."""
    known, first = next((plan.timing for plan in plans if plan.timing), None), plans[0]
    whole = first.tune.steps if isinstance(first, FineTunePlan) else isinstance(first, Plan)
    cards = tuple(_limited(plan, limit) if limit and isinstance(plan, FineTunePlan) else _card(plan) for plan in plans)
    return ComparedCards(
        of="limit" if limit else "run" if whole else "million", limit=limit,
        currency=known.prices.currency if known else "", cards=cards, best=chosen(list(map(Candidate.of, plans))),
    )  # fmt: skip


def _bare(plan: AnyPlan) -> ComparedCard:
    return ComparedCard(
        name=plan.gpu.name, verdict=plan.verdict, needed_bytes=plan.needed_bytes, available_bytes=plan.available_bytes,
        tokens_per_s=plan.timing.tokens_per_s if plan.timing else None,
    )  # fmt: skip


def _card(plan: AnyPlan) -> ComparedCard:
    """Of the whole run, else of a million tokens."""
    timing = plan.timing
    if timing is None:
        return _bare(plan)
    tokens = plan.asked.batch if isinstance(plan, InferencePlan) else settings_of(plan).tokens_per_step
    if timing.total_s is not None and timing.steps is not None:
        return _spent(plan, timing, timing.steps * tokens, timing.total_s.expected_s)
    return _spent(plan, timing, MILLION, timing.step_s.expected_s, MILLION / tokens)


def settings_of(plan: Plan | ClusterPlan | FineTunePlan) -> RunConfig | FineTune:
    return plan.tune if isinstance(plan, FineTunePlan) else plan.config


def _limited(plan: FineTunePlan, limit: Limit) -> ComparedCard:
    """Of what fits in a limit; without figures where that is nothing."""
    try:
        found = within(of_plan(plan), limit)
    except UserError as error:
        if not error.id.startswith("check."):
            raise
        return _bare(plan)
    timing = found.plan.timing
    if timing is None or timing.total_s is None:
        return _bare(plan)
    return _spent(plan, timing, found.tokens, timing.total_s.expected_s)


def _spent(plan: AnyPlan, spent: Spending, tokens: int, duration_s: float, factor: float = 1.0) -> ComparedCard:
    money, data = spent.money(), 0 if isinstance(plan, InferencePlan) else settings_of(plan).dataset_tokens

    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    figures = {
        "tokens": tokens, "epochs": tokens / data if data else None, "duration_s": duration_s * factor,
        "energy_j": times(spent.energy_expected_j), "cost": times(money[1] if money else None),
        "co2_g": times(spent.co2_expected_g),
    }  # fmt: skip
    return _bare(plan).model_copy(update=figures)
