"""What it takes to generate text with a model. `foretrain.plan_inference` for Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from foretrain.advice.advisor import advise
from foretrain.advice.record import Advices
from foretrain.advice.rules.base import Goal
from foretrain.analysis.finetune_memory import FineTuneExplanation, explain_generation
from foretrain.app.limits import Limits, priced, prices_of
from foretrain.app.plan import Cards, Config, Listen, Look, resolved_of, targets, words_of_cards
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import listed
from foretrain.base.records import Note
from foretrain.config.finetune.read import is_asked, is_finetune_file, read_finetune
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.source import find_source, model_named, unknown_model
from foretrain.config.inference import WORDS, Inference, asked_with, parse_inference
from foretrain.config.option import Option
from foretrain.config.options import RunConfig
from foretrain.config.presets import IN_FOUR_BITS, models
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.config.shape import facts_of_run
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.forecast import Forecast, Placement
from foretrain.predict.generation import Generation
from foretrain.predict.inference.plan import InferencePlan, RunnableModels, plan, runnable
from foretrain.predict.timing import Prices
from foretrain.runs.record import TrainedRun, read, source_of


def plan_inference(
    source: Config = "gpt2-124m", gpu: str | Gpu = "auto", *, used_by_others: str | int = 0, **options: Any
) -> InferencePlan:
    """The forecast of generating text: `foretrain.plan_inference("llama-3.1-8b", "RTX 4070", weights="q4_k_m")`.

    `source`: a model's name, "hf:owner/name", a folder with config.json, a run of foretrain, or a config as `plan`
    takes it. `gpu`: a name of the catalogue, "cpu", or "auto" for the card of this machine. `used_by_others`: memory
    that other programs use on the card, in bytes or as a text such as "2GB". `options`: context=8192, batch=4,
    weights="q8_0", kv="q8_0", prompt=512, engine="llama.cpp".
    Raises UserError for what cannot be planned.
    """
    stated = stated_bytes(used_by_others, "used_by_others") if isinstance(used_by_others, str) else used_by_others
    target = devices.checked(gpu, stated) if isinstance(gpu, Gpu) else devices.target(gpu, stated or None)
    model, asked = model_named_by(source), asked_with(options)
    return plan(model, asked, target.gpu, used_by_others_bytes=target.used_by_others_bytes)


def advise_inference(source: Config, gpu: str | Gpu = "auto", *, goal: Goal | None = None, **options: Any) -> Advices:
    """What to change, best first: `foretrain.advise_inference("llama-3.3-70b", "3090", weights="q4_k_m")`.

    As `plan_inference`. `goal`: "fit" or "speed"; None: speed where it fits, else fit. Raises UserError for what cannot
    be planned.
    """
    return advise(plan_inference(source, gpu, **options), goal=goal)


def runnable_models(words: Sequence[str], cards: Cards) -> RunnableModels | None:
    """Return what runs on a card where words name no model; None where they name one. Raises UserError."""
    words = [word for word in words if word != "--inference"]
    asked, _, _, left, _ = parse_inference(words)
    if left or cards.gpus:
        return None
    if asked.on_host or asked.split:
        raise UserError("usage.inference_no_model", models=listed([*list(models())[:12], "…"]))
    target, *more = targets(cards.gpu, cards.others, RunConfig())
    if more:
        raise UserError("usage.one_card", count=len(more) + 1)
    sources = [find_source(name) for name in models()]
    return runnable(sources, asked, target.gpu, target.used_by_others_bytes)


def model_named_by(source: Config) -> ModelSource:
    """Return the model of this name; a preset's name, too, is the published model. Raises UserError."""
    if isinstance(source, str | Path):
        return model_of_words([str(source)])
    resolved = resolved_of(source)
    return _source_of_run(resolved.config, resolved.name)


def model_of_words(words: Sequence[str]) -> ModelSource:
    """Return the model of the command line's words, or that a trainer's file names. Raises UserError."""
    first = words[0] if words else ""
    if first and source_of(Path(first)) == "trained":
        record = read(Path(first))
        assert isinstance(record, TrainedRun)
        return _source_of_run(record.config, first)
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
    return _source_of_run(resolved.config, resolved.name)


def _source_of_run(config: RunConfig, name: str) -> ModelSource:
    return ModelSource(name=name, where=name, config={}, facts=facts_of_run(config))


@dataclass(frozen=True)
class GenerationRequest:
    model: ModelSource
    asked: Inference
    words: tuple[str, ...]  # for the command that comes next
    gpu: str
    others: str
    sources: Mapping[str, str] = field(default_factory=dict)  # of the options that were typed
    notes: tuple[Note, ...] = ()
    kind = "generation"
    aliases: ClassVar[Mapping[str, str]] = {"batch_size": "batch", "seq_len": "context"}
    files: tuple[Path, ...] = ()
    given: frozenset[str] = frozenset()

    @classmethod
    def of(cls, words: Sequence[str], cards: Cards, model: ModelSource | None = None) -> "GenerationRequest":
        words = [f"-{word}" if word in ("-ngl", "-ncmoe") else word for word in words]  # as llama.cpp spells them
        gpu, together = words_of_cards(cards, words, WORDS)
        asked, typed, sources, left, notes = parse_inference([*words, *together])
        if not left:
            raise UserError("usage.inference_no_model", models=listed([*list(models())[:12], "…"]))
        own = (*left, "--inference", *typed[: len(typed) - len(together)])
        if model is not None and len(left) > 1:
            raise UserError("usage.inference_unknown_word", word=left[1][:40])
        return cls(model or model_of_words(left), asked, own, gpu, cards.others, sources, tuple(notes))

    @property
    def name(self) -> str:
        return self.model.name

    def settings(self, limits: Limits) -> tuple[Any, Mapping[str, Option], Mapping[str, str]]:
        return self.asked, WORDS.options, self.sources

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        if largest and largest not in ("batch", "context", *self.aliases):
            raise UserError("usage.inference_largest", value=largest[:40])

    def plans(
        self, limits: Limits, step_s: float | None = None, logged_mfu: float | None = None
    ) -> list[InferencePlan]:
        found = targets(self.gpu, self.others, RunConfig())
        limits = Limits(price=limits.price)
        config = priced(resolve([]), limits).config
        rents = prices_of(limits, config, [target.gpu for target in found])
        prices = [Prices.of(config).model_copy(update={"price_per_hour": rent}) for rent in rents]
        return [
            plan(self.model, self.asked, target.gpu, used_by_others_bytes=target.used_by_others_bytes, prices=each)
            for target, each in zip(found, prices, strict=True)
        ]

    def forecast(self, plan: InferencePlan) -> Forecast:
        where = Placement(plan.gpu, plan.used_by_others_bytes)
        return Forecast(Generation(self.model, plan.asked), where, plan)

    def explained(self, plan: InferencePlan, listen: Listen, look: Look) -> FineTuneExplanation:
        return explain_generation(plan, look.observed_bytes, look.process_bytes)
