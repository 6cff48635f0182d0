"""Of several cards: which of those that fit is the cheapest, the fastest, the one with the least energy."""

from collections.abc import Callable

from foretrain.base.records import Record
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


def _least(plans: list[Plan], figure: Callable[[Timing], float | None]) -> str | None:
    found = []
    for plan in plans:
        timing = plan.timing_of(plan.step)
        value = figure(timing) if timing else None
        if value is not None:
            found.append((value, plan.gpu.name))
    return min(found)[1] if found else None


def _money(timing: Timing) -> float | None:
    money = timing.money()
    return money[1] if money else None


def choose(plans: list[Plan]) -> Choice:
    """The best of the cards whose memory is enough for the step that is meant; a tight one counts only if none fits."""
    fitting = [plan for plan in plans if plan.verdict == "fits"]
    fitting = fitting or [plan for plan in plans if plan.verdict == "tight"]
    rented = {bool(plan.config.price_per_hour) for plan in plans}
    return Choice(
        cheapest=_least(fitting, _money),
        fastest=_least(fitting, lambda timing: timing.total_s.expected_s),
        least_energy=_least(fitting, lambda timing: timing.energy_expected_j),
        mixed_prices=len(rented) > 1,
    )
