"""What is asked of a fine-tuning run, as the command line and reports ask it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from foretrain.analysis.finetune_memory import FineTuneExplanation, explain
from foretrain.app import exact
from foretrain.app.finetune import plan_question, traced
from foretrain.app.finetuning.question import FineTuneQuestion, costs_in, question
from foretrain.app.limits import Limits, check_limits, priced, prices_of
from foretrain.app.plan import Cards, Listen, Look, check_speed, targets, words_of_cards
from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.asked import is_asked
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.finetune.words import WORDS
from foretrain.config.hub.facts import ModelSource
from foretrain.config.option import Option
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.energy import Prices
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.finetuning import of_plan
from foretrain.predict.forecast import Forecast
from foretrain.predict.trace import service
from foretrain.predict.trace.finetune.request import requests_for
from foretrain.predict.trace.record import Trace

__all__ = ["FineTuningRequest", "is_asked"]


@dataclass(frozen=True)
class FineTuningRequest:
    """A model or a trainer's file, how it is trained, and the cards."""

    asked: FineTuneQuestion
    gpu: str
    others: str
    kind = "fine-tuning"
    explains_traced = False
    aliases: ClassVar[Mapping[str, str]] = {}
    files: tuple[Path, ...] = ()
    given: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, words: Sequence[str], cards: Cards, data_tokens: str = "", model: ModelSource | None = None
    ) -> "FineTuningRequest":
        gpu, together = words_of_cards(cards, words, WORDS)
        data = [f"--dataset-tokens={data_tokens}"] if data_tokens else []
        return cls(question(words[0], [*words[1:], *data, *together], model), gpu, cards.others)

    @property
    def name(self) -> str:
        return self.asked.source.name

    @property
    def notes(self) -> tuple[Note, ...]:
        """Return what was read and how, but for what the answer itself says."""
        return tuple(note for note in self.asked.notes if note.id != "finetune_read_as")

    def settings(self, limits: Limits) -> tuple[Any, Mapping[str, Option], Mapping[str, str]]:
        return self.asked.tune, FINETUNE_OPTIONS, self.asked.origins

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        check_limits(limits, 1, traces=False)
        if limits.asks and look:
            raise UserError("usage.finetune_limit_alone", option=look)
        if largest and traced:
            raise UserError("usage.finetune_largest_alone", option="--exact")

    def plans(self, limits: Limits, step_s: float | None = None, logged_mfu: float | None = None) -> list[FineTunePlan]:
        check_speed("--step-time", step_s)
        resolved = priced(costs_in(self.asked.costs), limits)
        found = targets(self.gpu, self.others, resolved.config)
        rents = prices_of(limits, resolved.config, [target.gpu for target in found])
        prices = [Prices.of(resolved.config).model_copy(update={"price_per_hour": rent}) for rent in rents]
        return [
            plan_question(replace(self.asked, prices=each), target.gpu, target.used_by_others_bytes, step_s)
            for target, each in zip(found, prices, strict=True)
        ]

    def forecast(self, plan: FineTunePlan) -> Forecast:
        return of_plan(plan)

    def with_option(self, plan: FineTunePlan, option: str, value: int) -> FineTunePlan:
        return replanned(plan, **{option: value})

    def traced(self, plan: FineTunePlan, listen: Listen, look: Look) -> FineTunePlan:
        return traced(plan, self.asked, listen, exact.settings_of(alloc_conf=look.alloc_conf))

    def explained(self, plan: FineTunePlan, listen: Listen, look: Look) -> FineTuneExplanation:
        settings = exact.settings_of(alloc_conf=look.alloc_conf)
        trace = self._trace(plan, listen, settings) if plan.memory.source == "traced" else None
        readings = {"observed_bytes": look.observed_bytes, "process_bytes": look.process_bytes}
        return explain(plan, trace, settings=settings, **readings)

    def write_snapshot(self, plan: FineTunePlan, path: Path, listen: Listen, look: Look) -> None:
        settings = exact.settings_of(alloc_conf=look.alloc_conf)
        exact.write_trace(self._trace(plan, listen, settings), path, settings)

    def _trace(self, plan: FineTunePlan, listen: Listen, settings: Settings) -> Trace:
        try:
            return exact.worst(requests_for(self.asked.source, plan.tune, plan.gpu), listen, settings)
        except service.TraceUnavailable as error:
            raise UserError("environment.no_trace", reason=str(error)) from None
