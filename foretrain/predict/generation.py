"""`Generation`: a model that generates text, as a run that can be forecast."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.config.hub.facts import ModelSource
from foretrain.config.inference import MOST_BATCH, MOST_CONTEXT, Inference
from foretrain.predict.forecast import Forecast, Placement, Probe, Range
from foretrain.predict.inference.counted import facts_to_generate
from foretrain.predict.inference.plan import InferencePlan, Search, plan
from foretrain.predict.plan import Reading
from foretrain.predict.timing import PRICES, Prices


@dataclass(frozen=True)
class Generation:
    """A model and how it generates. A step is one token of each text."""

    kind = "generation"
    source: ModelSource
    asked: Inference
    prices: Prices = PRICES
    steps = None
    dataset_tokens = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def tokens_per_step(self) -> int:
        return self.asked.batch

    @property
    def ranges(self) -> Mapping[str, Range]:
        most = min(max(facts_to_generate(self.source).max_positions, self.asked.context), MOST_CONTEXT)
        return {"batch": Range(1, MOST_BATCH), "context": Range(1, most)}

    def but(self, **options: Any) -> "Generation":
        return replace(self, asked=Inference.model_validate({**self.asked.model_dump(), **options}))

    def on(self, where: Placement) -> Forecast:
        others, asked, cards = where.used_by_others_bytes, self.asked, where.cluster
        if cards is not None:
            links = {"link": cards.link.name, "network": cards.network.name if cards.network else ""}
            asked = asked.model_copy(update={"world": cards.world, "per_node": cards.per_node, **links})
        made = plan(self.source, asked, where.card, used_by_others_bytes=others, prices=self.prices)
        return Forecast(self, where, made)

    def with_steps(self, found: Forecast, steps: int) -> tuple[InferencePlan, tuple[str, ...]]:
        raise _no_steps("--within")

    def spent(self, found: Forecast, limit: Limit, reading: Reading) -> Callable[[int], float]:
        raise _no_steps(limit.as_option)

    def check(self, found: Forecast, text: str, *, steps: bool = False) -> None:
        if steps:
            raise _no_steps(text)

    def probe(self, found: Forecast, option: str, value: int) -> Probe:
        made = found.plan
        assert isinstance(made, InferencePlan)
        search = Search(made.facts, made.asked, self.asked.prompt, made.gpu, made.available_bytes)
        memory = search.memory({option: value})
        return Probe(value=value, verdict=memory.verdict, needed_expected_bytes=memory.needed_bytes)


def _no_steps(text: str) -> UserError:
    return UserError("usage.inference_without", option=text.split()[0])
