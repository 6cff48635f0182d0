"""What is asked of a fine-tuning run, from a model or a trainer's file, options and cards, and its answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from foretrain.advice import finetune as advisor
from foretrain.advice.finetune import SearchedPlan
from foretrain.advice.record import Advice
from foretrain.analysis.finetune_memory import FineTuneExplanation, explain
from foretrain.analysis.log_checks import CLOCK_HEADROOM
from foretrain.app import exact
from foretrain.app.limits import Limits, check_limits, priced, prices_of
from foretrain.app.plan import Cards, Listen, Look, check_speed, targets, words_of_cards
from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.options import FINETUNE_OPTIONS, Bound, FineTune
from foretrain.config.finetune.read import is_asked as is_asked
from foretrain.config.finetune.read import read_finetune
from foretrain.config.finetune.words import WORDS
from foretrain.config.hub.facts import ModelSource
from foretrain.config.option import Option
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.plan import FineTunePlan, bounded, check_exact, plan, replanned, timed
from foretrain.predict.finetune.traced import exact_finetune
from foretrain.predict.finetuning import of_plan
from foretrain.predict.forecast import Forecast
from foretrain.predict.timing import PRICES, Prices
from foretrain.predict.trace import service
from foretrain.predict.trace.finetune.request import requests_for
from foretrain.predict.trace.record import Trace


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
    prices = Prices.of(costs_in(reading.costs).config)
    return FineTuneQuestion(model, tune, reading.notes, prices, reading.origins, reading.costs, reading.unplanned)


def costs_in(costs: Mapping[str, str]) -> ResolvedConfig:
    return resolve([f"--{name}={value}" for name, value in costs.items()])


ESTIMATED = ("finetune_compile",)  # notes on what only the estimate leaves out


def plan_question(
    asked: FineTuneQuestion, gpu: str | Gpu, used_by_others: str | int = "", step_s: float | None = None
) -> FineTunePlan:
    """Return the forecast on a card. `step_s`: seconds of a step in a log. Raises UserError."""
    if isinstance(used_by_others, str):
        used_by_others = stated_bytes(used_by_others, "--used-by-others") if used_by_others else 0
    stated = used_by_others or None
    target = devices.checked(gpu, stated or 0) if isinstance(gpu, Gpu) else devices.target(gpu, stated)
    if target.gpu.kind != "cuda" or not target.gpu.is_trained_on:
        raise UserError("usage.finetune_needs_cuda", gpu=target.gpu.name)
    others, prices = target.used_by_others_bytes, asked.prices
    unplanned = asked.unplanned
    found = plan(asked.source, asked.tune, target.gpu, used_by_others_bytes=others, prices=prices, unplanned=unplanned)
    found = found.model_copy(update={"notes": (*asked.notes, *found.notes)})
    return found if step_s is None else _timed(found, step_s, prices)


def _timed(found: FineTunePlan, step_s: float, prices: Prices) -> FineTunePlan:
    if found.tune.bound != "exact":
        check_exact(found, "--step-time")
    made, gpu = timed(found, step_s, prices), found.gpu
    timing = made.timing
    if timing and timing.hfu and timing.hardware_flops_per_step and timing.hfu > CLOCK_HEADROOM:
        values = {"value": f"{step_s:g}", "hfu": timing.hfu, "gpu": gpu.name, "tokens": found.tune.tokens_per_step}
        peak = timing.hardware_flops_per_step / step_s / timing.hfu
        raise UserError("usage.finetune_step_time", option="--step-time", peak=peak, step=step_s, **values)
    return made


def traced(
    found: FineTunePlan, asked: FineTuneQuestion, listen: Callable[[str], None], settings: Settings | None = None
) -> FineTunePlan:
    """Trace the plan's memory in the real Trainer's loop. Raises UserError where that cannot be traced."""
    if found.tune.bound != "exact":
        check_exact(found, "--exact")
    if found.facts is None:
        return found  # it is traced already
    if any(note.id in ("four_bits_kept", "four_bits_unnamed") for note in found.notes):
        raise UserError("usage.finetune_bounded", option="--exact", keys=["llm_int8_skip_modules"])
    try:
        exact = exact_finetune(asked.source, found.tune, found.gpu, found.available_bytes, listen, settings)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None
    notes = tuple(note for note in found.notes if note.id not in ESTIMATED)
    return found.model_copy(update={"memory": bounded(exact.memory, found.bound), "notes": (*notes, *exact.notes)})


def advised(found: SearchedPlan) -> tuple[Advice, ...]:
    """Return what to change, best first; nothing where the run fits."""
    steps = list(searched(found))
    return steps[-1] if steps else ()


def searched(found: SearchedPlan) -> Iterator[tuple[Advice, ...]]:
    """Yield what `advised` has found so far; nothing where each change would need a trace."""
    if isinstance(found, FineTunePlan) and found.facts is None:
        return iter(())
    bounded = isinstance(found, FineTunePlan) and found.bound != "exact"
    return iter(()) if found.verdict in ("fits", None) or bounded else advisor.searched(found)


@dataclass(frozen=True)
class FineTuningRequest:
    asked: FineTuneQuestion
    gpu: str
    others: str
    kind = "fine-tuning"
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
