"""What is asked of a fine-tuning run, from a model or a trainer's file, options and cards, and its answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretrain.advice import finetune as advisor
from foretrain.advice.finetune import SearchedPlan
from foretrain.advice.record import Advice
from foretrain.analysis.log_checks import CLOCK_HEADROOM
from foretrain.app.limits import Limits, check_limits
from foretrain.app.plan import Cards, words_of_cards
from foretrain.app.request import Request
from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune import live
from foretrain.config.finetune.live import is_live as is_live
from foretrain.config.finetune.options import FINETUNE_OPTIONS, Bound, FineTune, asked
from foretrain.config.finetune.read import is_asked as is_asked
from foretrain.config.finetune.read import read_finetune
from foretrain.config.finetune.words import COSTS, WORDS, parse_words
from foretrain.config.hub.facts import ModelSource
from foretrain.config.option import Option
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.finetune.plan import FineTunePlan, check_exact, plan, replanned, timed
from foretrain.predict.finetuning import FineTuning, of_plan
from foretrain.predict.forecast import Forecast
from foretrain.predict.timing import Prices


@dataclass(frozen=True)
class FineTuneQuestion:
    """A model, how it is trained, a config with the prices that were typed, notes, and where each option is from."""

    source: ModelSource
    tune: FineTune
    notes: tuple[Note, ...] = ()
    costs: ResolvedConfig = field(default_factory=lambda: resolve([]))
    origins: Mapping[str, str] = field(default_factory=dict)
    unplanned: Mapping[str, Bound] = field(default_factory=dict)


def question(source: str, words: Sequence[str] = (), known: ModelSource | None = None) -> FineTuneQuestion:
    """Read a model, or a trainer's file, with words of the command line over it. Raises UserError."""
    model, tune, reading = read_finetune(source, words, known)
    return FineTuneQuestion(model, tune, reading.notes, costs_in(reading.costs), reading.origins, reading.unplanned)


def costs_in(costs: Mapping[str, str]) -> ResolvedConfig:
    return resolve([f"--{name}={value}" for name, value in costs.items()])


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
    others, prices = target.used_by_others_bytes, Prices.of(asked.costs.config)
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


def in_memory(source: Any, words: Sequence[str]) -> FineTuneQuestion:
    """Read a model or a config of transformers, with words of the command line over it. Raises UserError."""
    values, _, others, _ = parse_words(words)
    for name in others.keys() - set(COSTS):
        raise UserError("config.finetune_no_word", word=f"--{name}")
    if hasattr(source, "get_input_embeddings"):
        model, read = live.planned_model(source)
        values = {**read.model_dump(exclude={"batch_size", "seq_len"}), **values}  # a model says neither
    else:
        model = live.planned_config(source)
    return FineTuneQuestion(model, asked(model, values), costs=costs_in(others))


def changed(found: Forecast, **options: Any) -> Forecast:
    """Return a forecast of fine-tuning with other options. Raises UserError for what cannot be."""
    assert isinstance(found.plan, FineTunePlan)
    assert isinstance(found.run, FineTuning)
    return of_plan(replanned(found.plan, **options), found.run.source)


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
class FineTuningRequest(Request):
    asked: FineTuneQuestion
    cards: Cards
    kind = "fine-tuning"
    compares_limits = True

    @classmethod
    def of(cls, words: Sequence[str], cards: Cards, data_tokens: str = "", model: Any = None) -> "FineTuningRequest":
        """Return what words ask. `model`: that the first word names, or one in memory, which no word does."""
        cards, together = words_of_cards(cards, words, WORDS)
        more = [*([f"--dataset-tokens={data_tokens}"] if data_tokens else []), *together]
        if is_live(model):
            return cls(in_memory(model, [*words, *more]), cards)
        return cls(question(words[0], [*words[1:], *more], model), cards)

    @property
    def name(self) -> str:
        return self.asked.source.name

    @property
    def notes(self) -> Sequence[Note]:
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

    @property
    def costs(self) -> ResolvedConfig:
        return self.asked.costs

    def forecast_on(self, place: Any, costs: ResolvedConfig, step_s: float | None, mfu: float | None) -> Forecast:
        asked = replace(self.asked, costs=costs)
        return of_plan(plan_question(asked, place.gpu, place.used_by_others_bytes, step_s), asked.source)
