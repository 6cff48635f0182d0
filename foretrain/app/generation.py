"""What is asked of generating text: a model, how it generates, cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from foretrain.app.limits import Limits
from foretrain.app.plan import Cards, resolved_of, words_of_cards
from foretrain.app.request import Request
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import listed
from foretrain.base.records import Note
from foretrain.config.finetune.read import is_asked, is_finetune_file, read_finetune
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.source import find_source, model_named, unknown_model
from foretrain.config.inference import WORDS, Inference, parse_inference
from foretrain.config.option import Option
from foretrain.config.options import RunConfig
from foretrain.config.presets import IN_FOUR_BITS, models
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.config.shape import facts_of_run
from foretrain.predict.forecast import Forecast, Placement
from foretrain.predict.generation import Generation
from foretrain.predict.inference.plan import InferencePlan, RunnableModels, runnable
from foretrain.predict.timing import Prices
from foretrain.runs.record import TrainedRun, read, source_of


def runnable_models(words: Sequence[str], cards: Cards) -> RunnableModels | None:
    """Return what runs on a card where words name no model; None where they name one. Raises UserError."""
    words = [word for word in words if word != "--inference"]
    asked, _, _, left, _ = parse_inference(words)
    if left or cards.gpus:
        return None
    if asked.on_host or asked.split:
        raise UserError("usage.inference_no_model", models=listed([*list(models())[:12], "…"]))
    target, *more = cards.targets(RunConfig())
    if more:
        raise UserError("usage.one_card", count=len(more) + 1)
    sources = [find_source(name) for name in models()]
    return runnable(sources, asked, target.gpu, target.used_by_others_bytes)


def model_of_words(words: Sequence[str]) -> ModelSource:
    """Return the model of the command line's words, or that a trainer's file names. Raises UserError."""
    first = words[0] if words else ""
    if first and source_of(Path(first)) == "trained":
        record = read(Path(first))
        assert isinstance(record, TrainedRun)
        return source_of_run(record.config, first)
    if first and (is_asked([first]) or model_named(first)):
        if len(words) > 1:
            raise UserError("usage.inference_unknown_word", word=words[1][:40])
        if IN_FOUR_BITS.search(first) and model_named(first):  # whose preset has another name
            return find_source(first).model_copy(update={"where": first})
        return read_finetune(first)[0] if is_finetune_file(first) else find_source(first)
    try:
        resolved: ResolvedConfig = resolved_of(list(words))
    except ConfigError as error:
        named = any(problem.id.startswith("config.unknown_source") for problem in error.problems)
        published = unknown_model(first)
        if named and published.id == "config.hub_unknown_near":
            raise published from None
        raise
    return source_of_run(resolved.config, resolved.name)


def source_of_run(config: RunConfig, name: str) -> ModelSource:
    return ModelSource(name=name, where=name, config={}, facts=facts_of_run(config))


@dataclass(frozen=True)
class GenerationRequest(Request):
    model: ModelSource
    asked: Inference
    words: tuple[str, ...]  # for the command that comes next
    cards: Cards
    sources: Mapping[str, str] = field(default_factory=dict)  # of the options that were typed
    notes: Sequence[Note] = ()  # type: ignore[assignment]
    kind = "generation"
    aliases: ClassVar[Mapping[str, str]] = {"batch_size": "batch", "seq_len": "context"}

    @classmethod
    def of(cls, words: Sequence[str], cards: Cards, model: ModelSource | None = None) -> "GenerationRequest":
        words = [f"-{word}" if word in ("-ngl", "-ncmoe") else word for word in words]  # as llama.cpp spells them
        cards, together = words_of_cards(cards, words, WORDS)
        asked, typed, sources, left, notes = parse_inference([*words, *together])
        if not left:
            raise UserError("usage.inference_no_model", models=listed([*list(models())[:12], "…"]))
        own = (*left, "--inference", *typed[: len(typed) - len(together)])
        if model is not None and len(left) > 1:
            raise UserError("usage.inference_unknown_word", word=left[1][:40])
        return cls(model or model_of_words(left), asked, own, cards, sources, notes)

    @property
    def name(self) -> str:
        return self.model.name

    def settings(self, limits: Limits) -> tuple[Any, Mapping[str, Option], Mapping[str, str]]:
        return self.asked, WORDS.options, self.sources

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        if largest and largest not in ("batch", "context", *self.aliases):
            raise UserError("usage.inference_largest", value=largest[:40])

    @property
    def costs(self) -> ResolvedConfig:
        return resolve([])

    def forecast_on(self, place: Any, costs: ResolvedConfig, step_s: float | None, mfu: float | None) -> Forecast:
        if step_s is not None:
            raise UserError("usage.inference_without", option="--step-time")
        run = Generation(self.model, self.asked, Prices.of(costs.config))
        made = run.on(Placement(place.gpu, place.used_by_others_bytes))
        assert isinstance(made.plan, InferencePlan)
        return replace(made, run=replace(run, asked=made.plan.asked))
