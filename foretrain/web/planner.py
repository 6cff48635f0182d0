"""From what the page says to a plan. Nothing it says is a path: presets, cards and datasets are looked up in lists."""

import json
import shlex
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from foretrain.app.plan import make_plan
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.records import Record
from foretrain.config import init_from
from foretrain.config.presets import PRESETS, preset_named
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.data import corpus, dataset
from foretrain.data.config_data import of_config
from foretrain.data.token_layout import is_dataset
from foretrain.predict.plan import Plan
from foretrain.web import devices

Text = Annotated[StrictStr, Field(max_length=200)]
Value = StrictBool | StrictInt | StrictFloat | Annotated[StrictStr, Field(max_length=4096)]
MOST_CARDS = 512
Key = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]


class Asked(Record):
    """What stands in the form: a preset, values over it, a device and how many of it, what other programs use there,
    cards to compare."""

    preset: Text = ""
    values: dict[Key, Value] = Field(default={}, max_length=200)
    gpu: Text = "RTX 4070"
    count: Text = "1"
    others: Text = ""
    cards: tuple[Text, ...] = Field(default=(), max_length=60)
    name: Text = ""


class Pasted(Record):
    """A config that was pasted or dropped, with the name of its file."""

    name: Text = ""
    text: Annotated[StrictStr, Field(max_length=200_000)]


def presets() -> list[str]:
    """The names that a form can begin with."""
    return list(PRESETS)


def resolved(asked: Asked) -> ResolvedConfig:
    """The checked config of a form. Raises ConfigError with every problem."""
    words, problems = [], []
    if asked.preset:
        if preset_named(asked.preset) is None:
            problems.append(UserError("page.unknown_preset", word=asked.preset[:40], presets=list(PRESETS)))
        words.append(asked.preset)
    for key, value in asked.values.items():
        if key == "init_from" and isinstance(value, str) and init_from.is_path(value):
            problems.append(UserError("config.path_in_text", value=value[:80], source=key))
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"--{key}={text}")
    if problems:
        raise ConfigError(problems)
    found = resolve(words)
    if "device" in found.sources:  # of a pasted config, where it gives way to the device that is chosen, as a file's
        found.sources["device"] = "page"
    return found


def count(asked: Asked) -> int:
    """How many cards train together. Raises UserError for what is no such number."""
    text = asked.count.strip() or "1"
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CARDS):
        raise UserError("page.bad_count", value=text[:40], most=MOST_CARDS)
    return int(text)


def check_alone(asked: Asked, id: str) -> None:
    """Raise UserError `id` where several cards train together: what is asked is answered for one."""
    if count(asked) > 1:
        raise UserError(id, count=count(asked))


def command(asked: Asked) -> str:
    """The same plan in a terminal, for who has no page. The card of this machine needs no word."""
    words = ["foretrain", "plan", *([asked.preset] if asked.preset else [])]
    words += _cards(asked)
    words += ["--used-by-others", asked.others] if asked.others.strip() else []
    for key, value in asked.values.items():
        words.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
    return shlex.join(words)


def _cards(asked: Asked) -> list[str]:
    here = asked.gpu == devices.HERE
    if count(asked) > 1:
        return ["--gpus", str(count(asked)) if here else f"{count(asked)} x {asked.gpu}"]
    return [] if here else ["--gpu", asked.gpu]


def made(found: ResolvedConfig, gpu: str, others: str) -> Plan:
    """The plan of a config on a device. Raises UserError."""
    data = of_config(found, find=_find, built_in_tokens=_built_in_tokens)
    return make_plan(found, devices.target(gpu, others, found.config), data=data)


def _find(name: str) -> dataset.DatasetInfo | None:
    """The dataset of this name, of those that lie under data/."""
    path = _datasets().get(name)
    return None if path is None else _info(path, max(one.stat().st_mtime for one in path.iterdir()))


def _built_in_tokens() -> int:
    """Of the training split. In a browser Python's library has no sources: there, those of what built the site."""
    if not devices.NO_MACHINE:
        return corpus.size_bytes("train")
    return json.loads((resources.files("foretrain.web") / "corpus.json").read_text("utf-8"))["train_bytes"]


def _datasets() -> dict[str, Path]:
    """The datasets of this folder by name; links are none of them."""
    try:
        folders = [path for path in dataset.DATA_DIR.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return {}
    return {path.name: path for path in folders if is_dataset(path)}


@lru_cache(maxsize=32)
def _info(path: Path, changed_at: float) -> dataset.DatasetInfo:
    """Read once, and again when one of its files has changed."""
    return dataset.read_info(path)
