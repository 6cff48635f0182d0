"""What is asked of a fine-tuning run: a model, how it is trained, what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.base.records import Note
from foretrain.config.finetune.options import Bound, FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.facts import ModelSource
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.predict.energy import Prices
from foretrain.predict.timing import PRICES


@dataclass(frozen=True)
class FineTuneQuestion:
    """A model, how it is trained, notes, prices as typed (`costs`), and where each option is from."""

    source: ModelSource
    tune: FineTune
    notes: tuple[Note, ...] = ()
    prices: Prices = PRICES
    origins: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, str] = field(default_factory=dict)
    unplanned: Mapping[str, Bound] = field(default_factory=dict)


def question(source: str, words: Sequence[str] = (), known: ModelSource | None = None) -> FineTuneQuestion:
    """Read a model, or a trainer's file, with words of the command line over it. Raises UserError."""
    model, tune, reading = read_finetune(source, words, known)
    prices = prices_of(reading.costs)
    return FineTuneQuestion(model, tune, reading.notes, prices, reading.origins, reading.costs, reading.unplanned)


def prices_of(costs: Mapping[str, str]) -> Prices:
    return Prices.of(costs_in(costs).config)


def costs_in(costs: Mapping[str, str]) -> ResolvedConfig:
    return resolve([f"--{name}={value}" for name, value in costs.items()])
