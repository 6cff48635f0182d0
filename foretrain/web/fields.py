"""The form of each kind of run as JSON, made from its options: one that is added to them is on the page by itself."""

import math
from collections.abc import Mapping
from typing import Any

from foretrain.app.plan import card_here
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, isolated, option_help, option_unit, say
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS
from foretrain.config.inference import WORDS
from foretrain.config.option import GROUPS, Option
from foretrain.config.options import OPTIONS
from foretrain.config.presets import PRESETS, ModelPreset, models
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.hardware.cpu import cpu_device
from foretrain.hardware.devices import CPU, HERE
from foretrain.web import form

_STEPS = {"each": 1, "by64": 64, "cents": 0.02, "dimes": 0.1, "fifties": 50}
_GROWTH = {"doubling": (1.0,), "halves": (1.0, 1.5)}


def form_json(kind: str) -> dict[str, Any]:
    """Return what the form of a kind of run needs once: its options, its presets or models, its devices."""
    known = [_model(model) for model in models().values()]
    if kind == "pretraining":
        first = {"id": "", "text": say("page.no_preset"), "source": ""}
        known = [first, *({"id": name, "text": name, "source": ""} for name in PRESETS)]
    return {"fields": fields(kind), "models": known, "devices": devices(kind)}


def _model(model: ModelPreset) -> dict[str, str]:
    text = f"{isolated(model.name)} · {format_value(model.parameters, 'count')}"
    return {"id": model.name, "text": text, "source": say("page.finetune.source", repository=model.repository)}


def fields(kind: str = "pretraining") -> list[dict[str, Any]]:
    """Return every option that has an effect, as JSON: the basic ones first, then by group. Prices are those of any
    training run."""
    if kind == "pretraining":
        return _fields(OPTIONS, {})
    if kind == "generation":
        return _fields(WORDS.options, {})
    prices = [{**field, "basic": False} for field in _fields(OPTIONS, {}) if field["group"] == "cost"]
    return [*_fields(FINETUNE_OPTIONS, ASKED), *prices]


def _fields(options: Mapping[str, Option], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`defaults`: of the form's own."""
    shown = [option for option in options.values() if not option.inert]
    shown.sort(key=lambda option: (not option.basic, option.basic, GROUPS.index(option.group)))
    return [_field(option, defaults.get(option.name, option.default)) for option in shown]


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
    """Return the values that a slider of this option stops at; none where it has no slider. The number beside it takes
    the option's whole range."""
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


def devices(kind: str = "pretraining") -> list[dict[str, str]]:
    """Return the devices that a kind of run is planned for, this machine's first, as a chooser shows them."""
    only_cuda = kind == "fine-tuning"
    rows = [_device(gpu.name, gpu) for gpu in catalogue().values() if gpu.kind == "cuda" or not only_cuda]
    if form.NO_MACHINE:
        return rows
    return [*_here(), *rows, *([] if only_cuda else [_device(CPU, cpu_device(), here=True)])]


def _here() -> list[dict[str, str]]:
    try:
        found = card_here()
    except UserError:  # the catalogue lacks it
        return []
    return [_device(HERE, found.gpu, here=True)] if found else []


def _device(id: str, gpu: Gpu, *, here: bool = False) -> dict[str, str]:
    memory = [format_value(gpu.memory_bytes, "bytes")] if gpu.memory_bytes else []
    return {"id": id, "text": " · ".join([isolated(gpu.name), *memory, *([say("page.here")] if here else [])])}
