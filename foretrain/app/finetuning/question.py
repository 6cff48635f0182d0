"""What is asked of a fine-tuning run: a model, how it is trained, what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.app.plan import Cards, targets
from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.options import Bound, FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.finetune.words import WORDS
from foretrain.config.hub.facts import ModelSource
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.hardware.cluster import cluster
from foretrain.predict.energy import Prices
from foretrain.predict.timing import PRICES

LINKS = ("link", "network")


@dataclass(frozen=True)
class FineTuneQuestion:
    """What is asked: a model, how it is trained, notes on what was read, prices, and where each option is from.

    `costs`: the options about prices, as they were typed; `unplanned`: what is not planned, with what figures then are.
    """

    source: ModelSource
    tune: FineTune
    notes: tuple[Note, ...] = ()
    prices: Prices = PRICES
    origins: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, str] = field(default_factory=dict)
    unplanned: Mapping[str, Bound] = field(default_factory=dict)


def question(source: str, words: Sequence[str] = ()) -> FineTuneQuestion:
    """A model's name or path, or a trainer's file, with words of the command line over it. Raises UserError."""
    model, tune, reading = read_finetune(source, words)
    prices = prices_of(reading.costs)
    return FineTuneQuestion(model, tune, reading.notes, prices, reading.origins, reading.costs, reading.unplanned)


def words_of_cards(cards: Cards, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the card's name, and how many of it train together as words of the run. Raises UserError."""
    if not cards.gpus:
        return cards.gpu, []
    for word in WORDS.split(words):
        if word.key in ("world", "per_node"):
            raise UserError("usage.finetune_without.world_twice", option=word.name)
    found = cluster(cards.gpus, cards.link, cards.network, lambda: targets(cards.gpu, "", RunConfig())[0].gpu)
    own = [f"--world={found.world}", *([f"--per-node={found.per_node}"] if found.nodes > 1 else [])]
    return found.gpu.name, [*own, *(f"--{name}={getattr(cards, name)}" for name in LINKS if getattr(cards, name))]


def prices_of(costs: Mapping[str, str]) -> Prices:
    """What these options about prices say. Raises ConfigError for a bad value."""
    return Prices.of(costs_in(costs).config)


def costs_in(costs: Mapping[str, str]) -> ResolvedConfig:
    """A config with these options about prices, which are those of any run. Raises ConfigError for a bad value."""
    return resolve([f"--{name}={value}" for name, value in costs.items()])
