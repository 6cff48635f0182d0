"""The page's form as words of the command line, and their request. Names are looked up in lists; none is a path."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from foretrain.advice.rules.base import Goal
from foretrain.app.plan import Cards
from foretrain.app.planning import request_of
from foretrain.app.request import PretrainingRequest, Request
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
from foretrain.predict.finetune.traced import unknown

NO_MACHINE = sys.platform == "emscripten"  # Python in a browser: what it runs on cannot be seen
CONFIG = "config.json"
Kind = Literal["pretraining", "fine-tuning", "generation"]
Text = Annotated[StrictStr, Field(max_length=200)]
Value = StrictBool | StrictInt | StrictFloat | Annotated[StrictStr, Field(max_length=4096)]
Key = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
# What reads the options of a kind of run one by one, so that each problem is shown at its field.
PARSERS: dict[str, Callable[[list[str]], Any]] = {"fine-tuning": parse_words, "generation": parse_inference}


class Form(Record):
    """What stands in the form: a preset, a model or a config.json's text, options, devices, what advice is about."""

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


class Line(NamedTuple):
    """A form as a command line: the words of its run, the cards, and the model that the first word names."""

    form: Form
    words: list[str]
    cards: Cards
    model: ModelSource | None

    def request(self) -> Request:
        """Return what is asked. Raises UserError; ConfigError names every problem of the options."""
        kind, trainer = self.form.kind, self.form.trainer
        if kind != "pretraining":
            if kind == "fine-tuning" and self.model and self.model.facts is None:
                raise unknown(self.model, "the page traces no model by itself, but the same command does")
            return request_of(kind, self.words, self.cards, model=self.model)
        if self.cards.gpus and trainer == "nanogpt":
            raise UserError("usage.cluster_trainer", value=trainer)
        found = request_of("cards" if self.cards.gpus else kind, self.words, self.cards)
        assert isinstance(found, PretrainingRequest)
        resolved = replace(found.resolved, trainer=trainer) if trainer else found.resolved
        return replace(found, resolved=resolved, data_of=_data_of)

    def command(self) -> str:
        """Return the same plan in a terminal. The card of this machine needs no word."""
        first, cards = bool(self.form.model or self.form.config), self.cards
        kind = ["--inference"] if self.form.kind == "generation" else []
        where = ["--gpus", cards.gpus] if cards.gpus else [] if cards.gpu == HERE else ["--gpu", cards.gpu]
        where += ["--used-by-others", cards.others] if cards.others else []
        return printable(shlex.join(["foretrain", "plan", *self.words[:first], *kind, *where, *self.words[first:]]))


def line_of(form: Form) -> Line:
    """Return a form as a command line. Raises UserError; ConfigError with the problem of each option."""
    if NO_MACHINE and {HERE, CPU, ""} & {name.lower() for name in (form.gpu, *form.cards)}:
        raise UserError("page.no_machine")
    if "," in form.gpu:
        raise UserError("usage.one_card", count=form.gpu.count(",") + 1)
    model = _model(form)
    words = {key: as_word(key, value) for key, value in form.values.items()}
    if problems := [problem for key, word in words.items() if (problem := _problem(form, key, word))]:
        raise ConfigError(problems)
    if form.kind == "fine-tuning" and model is not None:
        # A form has options that do nothing beside others, which a terminal refuses; of a name that is a preset to
        # pretrain from, too, --method tells which is meant.
        nothing = idle(asked(model, parse_words([*words.values()]).values))
        method = {} if "method" in words else {"method": as_word("method", FineTune().method)}
        words = {**method, **{key: word for key, word in words.items() if OPTION_OF.get(key) not in nothing}}
    first = [CONFIG if form.config else form.model] if form.model or form.config else []
    count = form.count.strip() or "1"
    gpus = "" if count == "1" else count if form.gpu in (HERE, CPU) else f"{count} x {form.gpu}"
    return Line(form, [*first, *words.values()], Cards(gpus, form.gpu, others=form.others.strip()), model)


def compared(form: Form) -> Line:
    names, line = ",".join(dict.fromkeys(form.cards)) or form.gpu, line_of(form)
    if line.cards.gpus:
        raise UserError("usage.cluster_two", gpus=line.cards.gpus[:80], gpu=names[:80])
    return line._replace(cards=replace(line.cards, gpu=names))


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
