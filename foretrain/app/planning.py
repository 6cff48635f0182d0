"""One question of any kind of run: which kind words mean, its request, its plan and its advice. `foretrain.plan` and
`foretrain.advise` for Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from foretrain.app.limits import Limits, rents
from foretrain.app.plan import Cards, Config, Listen, resolved_of
from foretrain.app.request import PretrainingRequest, Request
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.config.presets import is_surely_asked
from foretrain.config.resolve import resolve
from foretrain.config.words import as_word
from foretrain.hardware.catalogue import Gpu, stated_bytes

if TYPE_CHECKING:
    from foretrain.advice import advisor, confirm
    from foretrain.advice.record import Advice, Advices, Confirmation
    from foretrain.advice.rules.base import Goal
    from foretrain.app import exact as traces
    from foretrain.app import finetune as tuning
    from foretrain.app import generation
    from foretrain.config.finetune.live import TransformersConfig, TransformersModel
    from foretrain.config.hub.facts import ModelSource
    from foretrain.predict import plan as planner
    from foretrain.predict import within as limited
    from foretrain.predict.finetune.plan import FineTunePlan
    from foretrain.predict.forecast import AnyPlan, Forecast
    from foretrain.predict.inference.plan import InferencePlan
    from foretrain.predict.plan import Plan
    from foretrain.predict.ranks import ClusterPlan
else:  # a plan waits for its own kind of run alone, and for traces and advice where it has some
    advisor, confirm = Later("foretrain.advice.advisor"), Later("foretrain.advice.confirm")
    tuning, generation = Later("foretrain.app.finetune"), Later("foretrain.app.generation")
    traces, limited = Later("foretrain.app.exact"), Later("foretrain.predict.within")
    planner = Later("foretrain.predict.plan")

GENERATES = "--inference"  # among the words of a run that generates text


def kind_of(words: Sequence[str], cards: Cards, *, inference: bool = False) -> str:
    """Return the kind of run that these words mean."""
    if inference or GENERATES in words:
        return "generation"
    if not is_surely_asked(words) and tuning.is_asked(words):
        return "fine-tuning"
    return "cards" if cards.gpus else "pretraining"


def request_of(
    kind: str, words: Sequence[str], cards: Cards, data_tokens: str = "", model: "ModelSource | None" = None
) -> Request:
    """Return what these words ask of this kind of run, about `model` where it is known. Raises UserError."""
    if kind == "generation":
        return generation.GenerationRequest.of([word for word in words if word != GENERATES], cards, model)
    if kind == "fine-tuning":
        return tuning.FineTuningRequest.of(words, cards, data_tokens, model)
    return PretrainingRequest(resolve(list(words)), cards)


def _request(
    config: Any, gpu: str | Gpu, gpus: str, used_by_others: str | int, inference: bool, options: Mapping[str, Any]
) -> Request:
    """Return what Python asks: `config` as a name, words, options, or an object in memory. Raises UserError."""
    links = {name: options[name] for name in ("link", "network") if gpus and name in options}
    options = {name: value for name, value in options.items() if name not in links}
    stated = stated_bytes(used_by_others, "used_by_others") if isinstance(used_by_others, str) and used_by_others else 0
    others, known = stated or used_by_others, gpu if isinstance(gpu, Gpu) else None
    cards = Cards(gpus, str(gpu), others=f"{others}B" if others else "", card=known, **links)
    words = [as_word(name.replace("_", "-"), value) for name, value in options.items()]
    if tuning.is_live(config):
        return tuning.FineTuningRequest.of(words, cards, model=config)
    if isinstance(config, str | Path | list | tuple):
        typed = [*config] if isinstance(config, list | tuple) else [str(config)]
        kind = kind_of([*typed, *words], cards, inference=inference)
        if kind in ("fine-tuning", "generation"):
            return request_of(kind, [*typed, *words], cards)
    if inference:
        resolved = resolved_of(config)
        model = generation.source_of_run(resolved.config, resolved.name)
        return generation.GenerationRequest.of([resolved.name, *words], cards, model)
    return PretrainingRequest(resolved_of(config, options), cards)


@overload
def plan(
    config: "TransformersConfig | TransformersModel", gpu: str | Gpu = "auto", **options: Any
) -> "FineTunePlan": ...
@overload
def plan(config: str | Path, gpu: str | Gpu = "auto", *, method: str, **options: Any) -> "FineTunePlan": ...
@overload
def plan(
    config: Config = "gpt2-124m", gpu: str | Gpu = "auto", *, inference: Literal[True], **options: Any
) -> "InferencePlan": ...
@overload
def plan(config: Config = "gpt2-124m", gpu: str | Gpu = "auto", *, gpus: str, **options: Any) -> "ClusterPlan": ...
@overload
def plan(
    config: Config = "gpt2-124m",
    gpu: str | Gpu = "auto",
    *,
    name: str = "",
    used_by_others: str | int = 0,
    step_s: float | None = None,
    exact: bool = False,
    within: str = "",
    **options: Any,
) -> "Plan": ...


def plan(
    config: Any = "gpt2-124m",
    gpu: str | Gpu = "auto",
    *,
    gpus: str = "",
    inference: bool = False,
    name: str = "",
    used_by_others: str | int = 0,
    step_s: float | None = None,
    exact: bool = False,
    within: str = "",
    **options: Any,
) -> "AnyPlan":
    """The forecast of a run on a card: `foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=8)`.

    `config`: a preset, a path of a TOML file or of a nanoGPT config (parsed, never run), words as on the command line,
    options by name, or a config that is made already. With `method` ("full", "lora", "qlora", "dora"), of a published
    model's name, "hf:owner/name", a folder with config.json, a trainer's file (axolotl, LLaMA-Factory, TRL, torchtune,
    TrainingArguments; read and never run), or a transformers config or model, it is the forecast of fine-tuning. With
    `inference=True`, that of generating text, also by a run of foretrain.
    `gpu`: a name of the catalogue, "cpu", or "auto" for the card of this machine. `gpus`: cards that share the run,
    such as "2 x RTX 4090", "2 nodes x 8 x A100", or a count alone, of the card `gpu`; with `link` and `network`, names
    of hardware/links.toml or "nvlink". `used_by_others`: memory that other programs use on each card, in bytes or as a
    text such as "2GB". `step_s`: seconds of a step in a log, which replaces the estimated time. `exact`: memory is
    traced with the real step (needs torch, fine-tuning the extra hf). `within`: "12h", "3kWh" or "5EUR": the plan has
    as many steps as fit in it. `options`: any other option of the run, such as batch_size=8, seq_len=2048 or
    weights="q4_k_m". `print(plan)` shows what the command line shows.
    Raises UserError for what cannot be planned; ConfigError names every problem of a config.
    """
    found, *more = _request(config, gpu, gpus, used_by_others, inference, options).forecasts(step_s=step_s)
    if more:
        raise UserError("usage.one_card", count=len(more) + 1)
    if exact:
        found = traces.traced(found, lambda state: None)
    made = limited.within(found, Limits(within=within).limit()).plan if within else found.plan
    return made.model_copy(update={"name": name}) if name else made


def advise(
    config: Any = "gpt2-124m",
    gpu: str | Gpu = "auto",
    *,
    gpus: str = "",
    inference: bool = False,
    used_by_others: str | int = "",
    goal: "Goal | None" = None,
    price: str | None = None,
    exact: int = 0,
    listen: Listen = lambda state: None,
    **options: Any,
) -> "Advices":
    """What to change, ranked by gain and cost: `foretrain.advise("gpt2-774m", "RTX 3060").advised[0].settings`.

    `config`, `gpu`, `gpus`, `inference`, `used_by_others`, `options`: as in `plan`. `goal`: "fit", "speed", "cost" or
    "quality", not all of every kind of run; None: what the run needs most. `price`: rent per hour, "0.35" or by card
    "4090=0.35,A100=1.2". `exact`: how many of the changes are traced (seconds each, needs torch), of which `listen`
    hears. `counts` of the answer says what 1, 2, 4 and 8 cards would give. Bytes and seconds, as the names say.
    Raises UserError for what cannot be planned or traced.
    """
    found = base_of(_request(config, gpu, gpus, used_by_others, inference, options), price)
    made = advised(found.plan, goal, price)
    return confirmed(made, found, exact, listen) if exact else made


def base_of(request: Request, price: str | None) -> "Forecast":
    """Return the run that advice starts from; of pretraining a price can name other cards, too. Raises UserError."""
    found, *more = request.forecasts(Limits(price, other_cards=request.kind == "pretraining"))
    if more:
        raise UserError("usage.one_card_advise", count=len(more) + 1)
    return found


def advised(plan: "AnyPlan", goal: "Goal | None", price: str | None = None) -> "Advices":
    return advisor.advise(plan, goal=goal, rents=rents(price, plan.config) if isinstance(plan, planner.Plan) else None)


def confirmed(made: "Advices", base: "Forecast", count: int, listen: Listen = lambda state: None) -> "Advices":
    """Return advice with what traces say of the first `count` changes. Raises UserError."""
    plan = base.plan
    if isinstance(plan, planner.Plan):
        with traces.untraced():
            return confirm.confirm(made, plan, traces.settings_of, count, listen)
    if not isinstance(plan, tuning.FineTunePlan):
        raise UserError("usage.inference_without", option="--exact")
    listed = "advised" if made.advised else "partial"
    checked = confirm.traced(getattr(made, listed), count, lambda change: _confirmation(base, change, listen))
    return made.model_copy(update={listed: checked})


def _confirmation(base: "Forecast", change: "Advice", listen: Listen) -> "Confirmation":
    try:
        other = traces.traced(tuning.changed(base, **change.options), listen)
    except UserError as error:
        return confirm.Confirmation(reason=str(error))
    needed, holds = other.peak_bytes, other.verdict == "fits"
    saved = base.peak_bytes - needed
    return confirm.Confirmation(verdict=other.verdict, needed_bytes=needed, saved_bytes=saved, holds=holds)
