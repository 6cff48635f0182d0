"""Of several cards: which of those that fit is the cheapest, the fastest, the one with the least energy."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from foretrain.base.records import Record
from foretrain.predict.energy import Spending
from foretrain.predict.memory import Verdict
from foretrain.predict.plan import Plan, Timing


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


def _candidate(plan: Plan, timing: Timing | None) -> Candidate:
    duration_s = timing.length_s.expected_s if timing else 0.0
    rented = bool(plan.config.price_per_hour)
    return Candidate.of(plan.gpu.name, plan.verdict, rented=rented, duration_s=duration_s, spent=timing)
