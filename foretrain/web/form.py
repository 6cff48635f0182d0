"""What stands in the page's form, as words of the command line, and the request that these make (app/request.py).

Nothing it says is a path: presets, models, cards and datasets are looked up in lists.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from foretrain.advice.rules.base import Goal
from foretrain.app.plan import Cards
from foretrain.app.request import PlanRequest, PretrainingRequest, request_of
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import printable
from foretrain.base.records import Record
from foretrain.config import weights_file
from foretrain.config.finetune.options import OPTION_OF, FineTune, asked
from foretrain.config.finetune.together import idle
from foretrain.config.finetune.words import COSTS, OTHERS, parse_words
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.source import preset_source, text_source, unknown_model
from foretrain.config.inference import parse_inference
from foretrain.config.presets import preset_named
from foretrain.config.resolve import ResolvedConfig, unknown_preset
from foretrain.config.words import as_word
from foretrain.data import corpus, dataset
from foretrain.data.corpus import ConfigData, data_of_config
from foretrain.data.token_layout import is_dataset
from foretrain.hardware.devices import CPU, HERE

NO_MACHINE = sys.platform == "emscripten"  # Python in a browser: what it runs on cannot be seen
CONFIG = "config.json"
Kind = Literal["pretraining", "fine-tuning", "generation"]
Text = Annotated[StrictStr, Field(max_length=200)]
Value = StrictBool | StrictInt | StrictFloat | Annotated[StrictStr, Field(max_length=4096)]
Key = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
# What reads the options of a kind of run one by one, so that each problem is told at its field.
PARSERS: dict[str, Callable[[list[str]], Any]] = {"fine-tuning": parse_words, "generation": parse_inference}


class Form(Record):
    """A preset, a model, or the text of a config.json with a name for it; options; a device, how many of it, what other
    programs use there; cards to compare; the step and the goal that advice is about."""

    kind: Kind = "pretraining"
    model: Text = ""
    config: Annotated[StrictStr, Field(max_length=100_000)] = ""
    values: dict[Key, Value] = Field(default={}, max_length=200)
    gpu: Text = "RTX 4070"
    count: Text = "1"
    others: Text = ""
    cards: tuple[Text, ...] = Field(default=(), max_length=60)
    trainer: Literal["", "foretrain", "nanogpt"] = ""
    goal: Goal | None = None

    @property
    def of_several(self) -> str:
        """Return --gpus; "" of one card."""
        count = self.count.strip() or "1"
        return "" if count == "1" else count if self.gpu in (HERE, CPU) else f"{count} x {self.gpu}"


def request_for(form: Form) -> PlanRequest:
    """Return what a form asks. Raises UserError; ConfigError names every problem of the options."""
    if NO_MACHINE and {HERE, CPU} & {form.gpu, *form.cards}:
        raise UserError("page.no_machine")
    model, cards = _model(form), Cards(form.of_several, form.gpu, others=form.others.strip())
    kind = "cards" if form.kind == "pretraining" and cards.gpus else form.kind
    if kind == "cards" and form.trainer == "nanogpt":
        raise UserError("usage.cluster_trainer", value=form.trainer)
    found = request_of(kind, words_of(form, model), cards, model=model)
    if not isinstance(found, PretrainingRequest):
        return found
    resolved = replace(found.resolved, trainer=form.trainer) if form.trainer else found.resolved
    return replace(found, resolved=resolved, data_of=_data_of)


def compared(form: Form) -> PlanRequest:
    """Return the request for the cards that are compared. Raises UserError."""
    names = ",".join(dict.fromkeys(form.cards)) or form.gpu
    if form.of_several:
        raise UserError("usage.cluster_two", gpus=form.of_several, gpu=names[:80])
    return request_for(form.model_copy(update={"gpu": names}))


def command(form: Form) -> str:
    """Return the same plan in a terminal. The card of this machine needs no word."""
    words, first = words_of(form, _model(form)), bool(form.model or form.config)
    kind = ["--inference"] if form.kind == "generation" else []
    card = [] if form.gpu == HERE else ["--gpu", form.gpu]
    cards = ["--gpus", form.of_several] if form.of_several else card
    others = ["--used-by-others", form.others.strip()] if form.others.strip() else []
    return printable(shlex.join(["foretrain", "plan", *words[:first], *kind, *cards, *others, *words[first:]]))


def _model(form: Form) -> ModelSource | None:
    """Return the model of Hugging Face's; None of a config to pretrain. Raises UserError for an unknown name."""
    if form.kind == "pretraining":
        if form.model and preset_named(form.model) is None:
            raise unknown_preset(form.model)
        return None
    if form.config:
        return text_source(form.config, CONFIG, printable(form.model).replace("\n", " ").strip())
    if (found := preset_source(form.model)) is None:
        raise unknown_model(form.model)
    return found


def words_of(form: Form, model: ModelSource | None) -> list[str]:
    """Return the words of the command line. Raises ConfigError with the problem of each option."""
    first = [CONFIG if form.config else form.model] if form.model or form.config else []
    words = {key: as_word(key, value) for key, value in form.values.items()}
    problems = [problem for key, word in words.items() if (problem := _problem(form, key, word))]
    if problems:
        raise ConfigError(problems)
    if model is None or form.kind == "generation":
        return [*first, *words.values()]
    # A form has options that do nothing beside others, which a terminal refuses; of a name that is a preset to pretrain
    # from, too, --method tells which is meant.
    nothing = idle(asked(model.facts, parse_words([*words.values()]).values))
    method = [] if "method" in words else [as_word("method", FineTune().method)]
    return [*first, *method, *(word for key, word in words.items() if OPTION_OF.get(key) not in nothing)]


def _problem(form: Form, key: str, word: str) -> UserError | None:
    value = form.values[key]
    if key == "init_from" and isinstance(value, str) and weights_file.is_path(value):
        return UserError("config.path_in_text", value=value[:80], source=key)
    if form.kind == "fine-tuning" and key.lower() in OTHERS and key not in COSTS:  # files and other models
        return UserError("config.finetune_no_option", option=f"--{key}")
    try:
        PARSERS.get(form.kind, list)([word])
    except UserError as problem:
        return problem
    return None


def _data_of(resolved: ResolvedConfig) -> ConfigData:
    return data_of_config(resolved, find=_find, built_in_tokens=_built_in_tokens)


def _find(name: str) -> dataset.DatasetInfo | None:
    """Return the dataset of this name under data/, never one elsewhere."""
    try:
        folders = [path for path in dataset.DATA_DIR.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return None
    path = next((path for path in folders if path.name == name and is_dataset(path)), None)
    return _info(path, max(one.stat().st_mtime for one in path.iterdir())) if path else None


@lru_cache(maxsize=32)
def _info(path: Path, changed_at: float) -> dataset.DatasetInfo:
    return dataset.read_info(path)


def _built_in_tokens() -> int:
    if not NO_MACHINE:
        return corpus.size_bytes("train")
    return json.loads((resources.files("foretrain.web") / "corpus.json").read_text("utf-8"))["train_bytes"]
