"""From what the page says to a plan. Nothing it says is a path: presets, cards and datasets are looked up in lists."""

import json
import math
import shlex
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from foretrain.app.plan import make_plan
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import option_help, option_unit
from foretrain.base.records import Record
from foretrain.config import weights_file
from foretrain.config.option import GROUPS, Option
from foretrain.config.options import OPTIONS
from foretrain.config.presets import PRESETS, preset_named
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.config.words import as_word
from foretrain.data import corpus, dataset
from foretrain.data.corpus import data_of_config
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
    name: Text = ""
    text: Annotated[StrictStr, Field(max_length=200_000)]


def presets() -> list[str]:
    return list(PRESETS)


def resolved(asked: Asked) -> ResolvedConfig:
    """The checked config of a form. Raises ConfigError with every problem."""
    words, problems = [], []
    if asked.preset:
        if preset_named(asked.preset) is None:
            problems.append(UserError("page.unknown_preset", word=asked.preset[:40], presets=list(PRESETS)))
        words.append(asked.preset)
    for key, value in asked.values.items():
        if key == "init_from" and isinstance(value, str) and weights_file.is_path(value):
            problems.append(UserError("config.path_in_text", value=value[:80], source=key))
        words.append(as_word(key, value))
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
    return shlex.join([*words, *(as_word(key, value) for key, value in asked.values.items())])


def _cards(asked: Asked) -> list[str]:
    here = asked.gpu == devices.HERE
    if count(asked) > 1:
        return ["--gpus", str(count(asked)) if here else f"{count(asked)} x {asked.gpu}"]
    return [] if here else ["--gpu", asked.gpu]


def made(found: ResolvedConfig, gpu: str, others: str) -> Plan:
    """The plan of a config on a device. Raises UserError."""
    data = data_of_config(found, find=_find, built_in_tokens=_built_in_tokens)
    return make_plan(found, devices.target(gpu, others, found.config), data=data)


def _find(name: str) -> dataset.DatasetInfo | None:
    path = _datasets().get(name)
    return None if path is None else _info(path, max(one.stat().st_mtime for one in path.iterdir()))


def _built_in_tokens() -> int:
    if not devices.NO_MACHINE:
        return corpus.size_bytes("train")
    return json.loads((resources.files("foretrain.web") / "corpus.json").read_text("utf-8"))["train_bytes"]


def _datasets() -> dict[str, Path]:
    try:
        folders = [path for path in dataset.DATA_DIR.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return {}
    return {path.name: path for path in folders if is_dataset(path)}


@lru_cache(maxsize=32)
def _info(path: Path, changed_at: float) -> dataset.DatasetInfo:
    return dataset.read_info(path)


_STEPS = {"each": 1, "by64": 64, "cents": 0.02, "dimes": 0.1, "fifties": 50}
_GROWTH = {"doubling": (1.0,), "halves": (1.0, 1.5)}


def fields(
    options: Mapping[str, Option] = OPTIONS, defaults: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Every option that has an effect, as JSON: the basic ones first, then by group. `defaults`: of a form's own."""
    shown = [option for option in options.values() if not option.inert]
    shown.sort(key=lambda option: (not option.basic, option.basic, GROUPS.index(option.group)))
    return [_field(knob, defaults.get(knob.name, knob.default)) for knob in shown]


def _field(option: Option, default: Any) -> dict[str, Any]:
    ends = {"least": option.least, "most": option.most}  # both allowed; an open end is left to the server
    return {
        "name": option.name, "group": option.group, "help": option_help(option.name, option.help, option.texts),
        "unit": option_unit(option.unit), "type": option.type,
        "default": default, "limits": option.limits if option.limits != option.help else "",
        "choices": list(option.choices), "basic": option.basic > 0, "stops": stops(option),
        **{end: value for end, value in ends.items() if value is not None},
    }  # fmt: skip


def stops(option: Option) -> list[float]:
    """The values that a slider of this option stops at; none where it has no slider. The number beside it takes the
    option's whole range."""
    if option.slider is None:
        return []
    (low, high, kind), whole = option.slider, option.type == "int"
    if kind in _STEPS:
        step = _STEPS[kind]
        return [round(low + i * step, 6) for i in range(round((high - low) / step) + 1)]
    first = [0.0] if low == 0 else []
    least = max(low, 1) if low >= 1 or low == 0 else low
    grown = _decades(least, high) if kind == "decades" else _powers(least, high, _GROWTH[kind])
    values = first + [value for value in grown if least <= value <= high]
    return sorted({int(value) if whole else value for value in values if not whole or value == int(value)})


def _powers(low: float, high: float, factors: tuple[float, ...]) -> list[float]:
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    return [2.0**power * factor for power in powers for factor in factors]


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 3, 5, 7, 10, 20, … between two ends."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in (1, 1.5, 2, 3, 4, 5, 6, 8)]
