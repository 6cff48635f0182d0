"""What a change of a pretraining run costs, and which of several is best.

Price: what a change costs, as a share of the run's time. The step's slowdown (or the whole run's, or its money, as the
goal asks), and on top what each exactness and rule is taken to be worth: a change that rounds otherwise counts as 5 %
of the time, another optimizer as 50 %, another model as the whole time and as the share of its parameters and context
that is given up, another card as one and a half, each change after the first as 1 %. That a smaller model or a larger
card is faster is not counted for it; but where cost is the goal, a rented card costs its rent alone. These are a
choice, not a measurement; docs/advice.md says so.
"""

from foretrain.advice.rules import BY_ID, ORDER
from foretrain.advice.rules.base import Exactness
from foretrain.advice.search import Search, Try
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape

TOLLS: dict[Exactness, float] = {
    "exact": 0.0, "rounding": 0.05, "other tokens": 0.5, "other optimizer": 0.5, "other model": 1.0,
}  # fmt: skip
EACH_MORE = 0.01
UNTIMED = 0.3  # slowdown that is taken where nothing is known of the card's speed


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
    """The least price first; of equal ones, what users can afford first. What has to be bought comes last, unless the
    goal is cost and what it costs was said."""
    bought = tried.buys(search.state) and search.goal != "cost"
    return bought, round(search.price(tried), 3), ORDER[tried.rules[-1]]


def given_up(before: RunConfig, after: RunConfig) -> float:
    """The share of parameters, and of context, that a smaller model has less."""
    params = ModelShape.of(after).n_params / ModelShape.of(before).n_params
    return max(0.0, 1 - params) + max(0.0, 1 - after.block_size / before.block_size)
