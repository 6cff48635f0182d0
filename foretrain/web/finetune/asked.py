"""From what the page says of a fine-tuning run to its plan, by the use cases of the terminal (app/finetune.py).

Nothing it says is a path: a model is a preset or the text of a config.json, and options are words of the command line.
"""

from typing import Annotated, Any

from pydantic import Field, StrictStr

from foretrain.app.finetune import plan_question
from foretrain.app.finetuning.question import FineTuneQuestion, prices_of
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import printable
from foretrain.base.records import Record
from foretrain.config.finetune import options
from foretrain.config.finetune.words import COSTS, OTHERS, parse_words
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.source import preset_source, text_source, unknown_model
from foretrain.config.words import as_word
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.web import devices
from foretrain.web.planner import Key, Text, Value

CONFIG = "config.json"


class Asked(Record):
    """What stands in the form: a preset, or the text of a config.json with a name for it; options; a device, what
    other programs use there; cards to compare."""

    model: Text = "qwen3-8b"
    config: Annotated[StrictStr, Field(max_length=100_000)] = ""
    values: dict[Key, Value] = Field(default={}, max_length=100)
    gpu: Text = "RTX 4090"
    others: Text = ""
    cards: tuple[Text, ...] = Field(default=(), max_length=60)


def question(asked: Asked) -> FineTuneQuestion:
    """The model and how it is trained. Raises UserError; ConfigError names every problem of the options."""
    values, costs = _values(asked)
    model = _model(asked)
    return FineTuneQuestion(model, options.asked(model.facts, values), prices=prices_of(costs), costs=costs)


def _model(asked: Asked) -> ModelSource:
    if asked.config:
        name = printable(asked.model).replace("\n", " ").strip()
        return text_source(asked.config, CONFIG, name)
    found = preset_source(asked.model)
    if found is None:
        raise unknown_model(asked.model)
    return found


def _values(asked: Asked) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    costs: dict[str, str] = {}
    problems: list[UserError] = []
    for word in words_of(asked):
        try:
            key = word.partition("=")[0].lstrip("-").lower()
            if key in OTHERS and key not in COSTS:  # files and other models are none of a form's
                raise UserError("config.finetune_no_option", option=f"--{key}")
            found = parse_words([word])
            values |= found.values
            costs |= found.others
        except UserError as problem:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return values, costs


def words_of(asked: Asked) -> list[str]:
    return [as_word(key, value) for key, value in asked.values.items()]


def target(asked: Asked) -> devices.Target:
    """The device of the form, with what others use there. Raises UserError."""
    return devices.target(asked.gpu, asked.others)


def made(found: FineTuneQuestion, target: devices.Target) -> FineTunePlan:
    """The plan on a device. Raises UserError."""
    return plan_question(found, target.gpu, target.used_by_others_bytes)
