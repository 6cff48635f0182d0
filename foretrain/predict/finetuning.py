"""`FineTuning`: a model of Hugging Face and how it is fine-tuned, as a run that can be forecast."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretrain.base.quantities import Limit
from foretrain.config.finetune.options import Bound, FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.predict.finetune.plan import FineTunePlan, check_exact, plan, untimed
from foretrain.predict.finetune.time import with_steps
from foretrain.predict.forecast import Forecast, Placement, Probe, Range
from foretrain.predict.plan import Reading
from foretrain.predict.timing import PRICES, Prices, Timing
from foretrain.predict.within import spent_of

MOST, MOST_TOKENS, TOKENS = 4096, 1_048_576, 64  # values that a search tries; sequences grow by so many tokens


@dataclass(frozen=True)
class FineTuning:
    """A model, how it is trained, what that costs. `unplanned`: settings that only bound the figures."""

    kind = "fine-tuning"
    source: ModelSource
    tune: FineTune
    prices: Prices = PRICES
    unplanned: Mapping[str, Bound] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def tokens_per_step(self) -> int:
        return self.tune.tokens_per_step

    @property
    def steps(self) -> int | None:
        return self.tune.steps

    @property
    def dataset_tokens(self) -> int | None:
        return self.tune.dataset_tokens or None

    @property
    def ranges(self) -> Mapping[str, Range]:
        facts = self.source.facts
        positions = min(MOST_TOKENS, facts.max_positions if facts else MOST_TOKENS)
        learned = facts is not None and facts.positions == "learned"
        goes_on = positions < MOST_TOKENS and not learned
        adapters = {"lora_r": Range(1, MOST)} if self.tune.adapters else {}
        tokens = Range(min(TOKENS, positions), positions, goes_on)
        return {"batch_size": Range(self.tune.least_batch, MOST), "seq_len": tokens, **adapters}

    def but(self, **options: Any) -> "FineTuning":
        return replace(self, tune=FineTune.model_validate({**self.tune.model_dump(), **options}))

    def on(self, where: Placement) -> Forecast:
        others, unplanned = where.used_by_others_bytes, self.unplanned
        made = plan(
            self.source, self.tune, where.card, used_by_others_bytes=others, prices=self.prices, unplanned=unplanned
        )
        return Forecast(self, where, made)

    def with_steps(self, found: Forecast, steps: int) -> tuple[FineTunePlan, tuple[str, ...]]:
        timing = found.timing
        assert isinstance(found.plan, FineTunePlan)
        assert isinstance(timing, Timing)
        timing = with_steps(timing, found.where.card, steps, self.tune.world)
        tune = self.tune.model_copy(update={"max_steps": steps})
        return found.plan.model_copy(update={"tune": tune, "timing": timing}), ("max_steps",)

    def spent(self, found: Forecast, limit: Limit, reading: Reading) -> Callable[[int], float]:
        timing = found.timing
        assert isinstance(timing, Timing)

        def spent(steps: int) -> float:
            made = with_steps(timing, found.where.card, steps, self.tune.world)
            return spent_of(made.total_s or made.step_s, made, limit, reading)

        return spent

    def check(self, found: Forecast, text: str, *, steps: bool = False) -> None:
        if isinstance(found.plan, FineTunePlan):
            check_exact(found.plan, text)

    def probe(self, found: Forecast, option: str, value: int) -> Probe:
        assert isinstance(found.plan, FineTunePlan)
        made = untimed(found.plan, **{option: value})
        room, verdict = made.available_bytes, made.verdict
        if verdict == "fits" and room is not None and made.needed_bytes > room:
            verdict = "tight"
        return Probe(value=value, verdict=verdict, needed_expected_bytes=made.needed_bytes)


def of_plan(made: FineTunePlan, source: ModelSource | None = None) -> Forecast:
    """Return a plan as a forecast. `source`: the model with its whole config, which a trace needs."""
    prices = made.timing.prices if made.timing else PRICES
    unplanned: dict[str, Bound] = {name: made.bound for name in made.bounded_by if name not in made.tune.bounded_by}
    run = FineTuning(source or made.source, made.tune, prices, unplanned)
    return Forecast(run, Placement(made.gpu, made.used_by_others_bytes), made)
