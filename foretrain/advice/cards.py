"""Of several cards: what each takes of a run, and which that fits is the cheapest, the fastest, the least in energy."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.base.records import Record
from foretrain.predict.energy import Spending
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.finetuning import of_plan
from foretrain.predict.memory import Verdict
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.within import within

MILLION = 1_000_000


class Choice(Record):
    """Names of cards; None where no card that fits has the figure. `mixed_prices`: some are rented, some are not."""

    cheapest: str | None
    fastest: str | None
    least_energy: str | None
    mixed_prices: bool

    def marks(self, name: str) -> tuple[str, ...]:
        """What a card is best at: the fields above."""
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
    def of(
        cls, name: str, verdict: Verdict | None, *, rented: bool, duration_s: float, spent: Spending | None
    ) -> "Candidate":
        """With what it spends; of a card whose speed is not known (None), nothing."""
        if spent is None:
            return cls(name, verdict, rented)
        money = spent.money()
        return cls(name, verdict, rented, duration_s, money[1] if money else None, spent.energy_expected_j)


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


def choose(plans: Sequence[Plan]) -> Choice:
    """The best cards for the step that is meant."""
    return chosen([_candidate(plan, plan.timing_of(plan.step)) for plan in plans])


def _candidate(plan: Plan | FineTunePlan, timing: Timing | None) -> Candidate:
    duration_s = timing.length_s.expected_s if timing else 0.0
    rented = bool(plan.config.price_per_hour if isinstance(plan, Plan) else timing and timing.prices.price_per_hour)
    return Candidate.of(plan.gpu.name, plan.verdict, rented=rented, duration_s=duration_s, spent=timing)


class FineTuneCard(Record):
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


class FineTuneCards(Record):
    """What is shown of several cards. `of`: the whole run, a million tokens where its length is not known, or what
    fits in a limit. `best` goes by the tokens that all of them have to train, so also by those that fit in a limit.

    `cost` of a card is its rent, of one without rent its electricity, in `currency`.
    """

    of: Literal["run", "million", "limit"]
    limit: Limit | None
    currency: str
    cards: tuple[FineTuneCard, ...]
    best: Choice


def compared(plans: Sequence[FineTunePlan], limit: Limit | None = None) -> FineTuneCards:
    """The cards beside each other. Raises UserError where nobody can say what the limit is of any of them."""
    known = next((plan.timing for plan in plans if plan.timing), None)
    of = "limit" if limit else "run" if plans[0].tune.steps else "million"
    cards = tuple(_limited(plan, limit) if limit else _card(plan) for plan in plans)
    candidates = [_candidate(plan, plan.timing) for plan in plans]
    return FineTuneCards(
        of=of, limit=limit, currency=known.prices.currency if known else "", cards=cards, best=chosen(candidates)
    )  # fmt: skip


def _bare(plan: FineTunePlan) -> FineTuneCard:
    return FineTuneCard(
        name=plan.gpu.name, verdict=plan.verdict, needed_bytes=plan.needed_bytes, available_bytes=plan.available_bytes,
        tokens_per_s=plan.timing.tokens_per_s if plan.timing else None,
    )  # fmt: skip


def _card(plan: FineTunePlan) -> FineTuneCard:
    """Of the whole run, else of a million tokens."""
    timing, tune = plan.timing, plan.tune
    if timing is None:
        return _bare(plan)
    if timing.total_s and timing.steps:
        return _spent(plan, timing, timing.steps * tune.tokens_per_step, timing.total_s.expected_s)
    return _spent(plan, timing, MILLION, timing.step_s.expected_s, MILLION / tune.tokens_per_step)


def _limited(plan: FineTunePlan, limit: Limit) -> FineTuneCard:
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


def _spent(plan: FineTunePlan, spent: Spending, tokens: int, duration_s: float, factor: float = 1.0) -> FineTuneCard:
    """A card with its figures, times `factor`."""
    money, data = spent.money(), plan.tune.dataset_tokens

    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    figures = {
        "tokens": tokens, "epochs": tokens / data if data else None, "duration_s": duration_s * factor,
        "energy_j": times(spent.energy_expected_j), "cost": times(money[1] if money else None),
        "co2_g": times(spent.co2_expected_g),
    }  # fmt: skip
    return _bare(plan).model_copy(update=figures)
