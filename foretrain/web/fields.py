"""The form of the planner, made from the options: one that is added to config/options.py is on the page by itself."""

import math
from typing import Any

from foretrain.base.messages import knob_help, knob_unit
from foretrain.config.option import GROUPS, Option
from foretrain.config.options import OPTIONS

_STEPS = {"each": 1, "by64": 64, "cents": 0.02, "dimes": 0.1, "fifties": 50}
_GROWTH = {"doubling": (1.0,), "halves": (1.0, 1.5)}


def fields() -> list[dict[str, Any]]:
    """Every option that has an effect, as JSON: the basic ones first, then by group."""
    shown = [option for option in OPTIONS.values() if not option.inert]
    shown.sort(key=lambda option: (not option.basic, option.basic, GROUPS.index(option.group)))
    return [_field(knob) for knob in shown]


def _field(option: Option) -> dict[str, Any]:
    ends = {"least": option.least, "most": option.most}  # both allowed; an open end is left to the server
    return {
        "name": option.name, "group": option.group, "help": knob_help(option.name, option.help),
        "unit": knob_unit(option.unit), "type": option.type,
        "default": option.default, "limits": option.limits if option.limits != option.help else "",
        "choices": list(option.choices), "basic": option.basic > 0, "stops": stops(option),
        **{end: value for end, value in ends.items() if value is not None},
    }  # fmt: skip


def stops(option: Option) -> list[float]:
    """The values that a slider of this option stops at; none where it has no slider. The number beside it takes the
    option's whole range."""
    return [] if option.slider is None else stops_of(*option.slider, whole=option.type == "int")


def stops_of(low: float, high: float, kind: str, *, whole: bool) -> list[float]:
    """Where a slider between two ends stops; `kind`: how its stops are apart, `whole`: only at whole numbers."""
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
