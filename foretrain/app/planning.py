"""`foretrain.plan`, `plan_finetune` and `advise_finetune` for Python: pretraining and fine-tuning, by what is given."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

from foretrain.advice import confirm
from foretrain.advice.advisor import advise
from foretrain.advice.record import Advice, Advices, Confirmation
from foretrain.advice.rules.base import Goal
from foretrain.app import plan as pretraining
from foretrain.app.finetune import FineTuneQuestion, costs_in, plan_question, question, traced
from foretrain.app.limits import Limits
from foretrain.app.plan import Config
from foretrain.base.errors import UserError
from foretrain.config.finetune import live
from foretrain.config.finetune.live import TransformersConfig, TransformersModel, is_live
from foretrain.config.finetune.options import asked
from foretrain.config.finetune.read import is_asked
from foretrain.config.finetune.words import COSTS, parse_words
from foretrain.config.words import as_word
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.finetuning import of_plan
from foretrain.predict.plan import Plan
from foretrain.predict.timing import Prices
from foretrain.predict.within import within as within_limit

Source = str | Path | FineTuneQuestion | TransformersConfig | TransformersModel


def plan_finetune(
    source: Source,
    gpu: str | Gpu = "auto",
    *,
    used_by_others: str | int = 0,
    step_s: float | None = None,
    exact: bool = False,
    within: str = "",
    **options: Any,
) -> FineTunePlan:
    """The forecast of fine-tuning a model: `foretrain.plan_finetune("qwen3-0.6b", gpu="4070", method="lora")`.

    `source`: a model's name, "hf:owner/name", a folder with config.json, a trainer's file (axolotl, LLaMA-Factory, TRL,
    torchtune, TrainingArguments; read and never run), or a transformers config or model, with peft's adapters or
    without. `gpu`: a name of the catalogue, or "auto" for the card of this machine. `used_by_others`: memory that other
    programs use on the card, in bytes or as a text such as "2GB". `step_s`: seconds of a step in a log, which replaces
    the estimated time. `exact`: memory is traced with the real Trainer's loop (needs the extra hf). `within`: "12h",
    "3kWh" or "5EUR": the plan has as many steps as fit in it (`tune.max_steps`). `options`: those of
    `foretrain plan MODEL`, such as method="qlora", seq_len=2048, dataset_tokens="10M", price_per_kwh=0.25.
    `print(plan)` shows what the command line shows with --full.
    Raises UserError for what cannot be planned.
    """
    asked = asked_of(source, options)
    stated = stated_bytes(used_by_others, "used_by_others") if isinstance(used_by_others, str) else used_by_others
    found = plan_question(asked, gpu, stated, step_s)
    found = traced(found, asked, lambda text: None) if exact else found
    if within:
        fitting = within_limit(of_plan(found), Limits(within=within).limit()).plan
        assert isinstance(fitting, FineTunePlan)
        return fitting
    return found


def asked_of(source: Source, options: Mapping[str, Any]) -> FineTuneQuestion:
    words = [as_word(name.replace("_", "-"), value) for name, value in options.items()]
    if isinstance(source, FineTuneQuestion):
        return source
    if isinstance(source, str | Path):
        return question(str(source), words)
    values, _, others, _ = parse_words(words)
    for name in others.keys() - set(COSTS):
        raise UserError("config.finetune_no_word", word=f"--{name}")
    if hasattr(source, "get_input_embeddings"):
        model, read = live.planned_model(source)
        values = {**read.model_dump(exclude={"batch_size", "seq_len"}), **values}  # a model says neither
    else:
        model = live.planned_config(source)
    tune = asked(model, values)
    return FineTuneQuestion(model, tune, prices=Prices.of(costs_in(others).config), costs=others)


@overload
def plan(
    config: TransformersConfig | TransformersModel,
    gpu: str | Gpu = "auto",
    *,
    used_by_others: str | int = 0,
    **options: Any,
) -> FineTunePlan: ...
@overload
def plan(
    config: str | Path, gpu: str | Gpu = "auto", *, method: str, used_by_others: str | int = 0, **options: Any
) -> FineTunePlan: ...
@overload
def plan(
    config: Config = "gpt2-124m",
    gpu: str | Gpu = "auto",
    *,
    name: str = "",
    used_by_others: str | int = 0,
    step_s: float | None = None,
    **options: Any,
) -> Plan: ...


def plan(
    config: Any = "gpt2-124m",
    gpu: str | Gpu = "auto",
    *,
    name: str = "",
    used_by_others: str | int = 0,
    step_s: float | None = None,
    **options: Any,
) -> Plan | FineTunePlan:
    """The forecast for a config on a card: `foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=8)`.

    `config`: a preset, a path of a TOML file or of a nanoGPT config (parsed, never run), words as on the command line,
    options by name, or a config that is made already. With `method` ("full", "lora", "qlora", "dora"), and of a
    transformers model or config, it is the forecast of fine-tuning, as `plan_finetune` makes it.
    `gpu`: a name of the catalogue, "cpu", or "auto" for the card of this machine.
    `used_by_others`: memory that other programs use on the card, in bytes or as a text such as "2GB".
    `step_s`: seconds of one iteration in a log, which replaces the estimated time of a step. `options`: any option of
    the config, such as batch_size=8. `print(plan)` shows what the command line shows.
    Raises UserError for what cannot be planned; ConfigError names every problem of a config.
    """
    if is_live(config) or (isinstance(config, str | Path) and "method" in options):
        found = plan_finetune(config, gpu, used_by_others=used_by_others, step_s=step_s, **options)
        return found.model_copy(update={"name": name}) if name else found
    if isinstance(config, str | Path) and is_asked([str(config)]):
        raise UserError("usage.plan_finetune", source=str(config)[:100])
    return pretraining.plan(config, gpu, name=name, used_by_others=used_by_others, step_s=step_s, **options)


Listen = Callable[[str], None]


def advise_finetune(
    source: Source,
    gpu: str = "auto",
    *,
    used_by_others: str | int = "",
    goal: Goal | None = None,
    exact: int = 0,
    listen: Listen = lambda state: None,
    **options: Any,
) -> Advices:
    """What to change in a fine-tuning run, best first: `foretrain.advise_finetune("qwen3-8b", "4070", method="lora")`.

    `source`, `options`: as in `plan_finetune`. `used_by_others`: memory that other programs use on the card, in bytes
    or as a text such as "2GB". `goal`: "fit", "speed" or "cost"; None: speed where the run fits, else fit. `exact`: how
    many of the changes are traced with the real Trainer's loop (seconds each, needs the extra hf), of which `listen`
    hears.
    Bytes and seconds, as the names say; `effect.slower` is a share of the time of a token.
    Raises UserError for what cannot be planned.
    """
    asked = asked_of(source, options)
    plan = plan_question(asked, gpu, used_by_others)
    return confirmed(advise(plan, goal=goal), plan, asked, exact, listen)


def confirmed(found: Advices, plan: FineTunePlan, asked: FineTuneQuestion, count: int, listen: Listen) -> Advices:
    listed = "advised" if found.advised else "partial"
    checked = confirm.traced(getattr(found, listed), count, lambda change: _confirmation(plan, change, asked, listen))
    return found.model_copy(update={listed: checked})


def _confirmation(plan: FineTunePlan, change: Advice, asked: FineTuneQuestion, listen: Listen) -> Confirmation:
    try:
        other = traced(replanned(plan, **change.options), asked, listen)
    except UserError as error:
        return Confirmation(reason=str(error))
    saved, holds = plan.needed_bytes - other.needed_bytes, other.verdict == "fits"
    return Confirmation(verdict=other.verdict, needed_bytes=other.needed_bytes, saved_bytes=saved, holds=holds)
