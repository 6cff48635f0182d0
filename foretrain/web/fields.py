"""The form of the planner, made from the knobs: a knob that is added to config/options.py is on the page by itself."""

import math
from typing import Any, get_args

from foretrain.base.messages import knob_help, knob_unit
from foretrain.config.options import GROUPS, Knob, RunConfig
from foretrain.config.resolve import KNOBS

# What most people ask about comes first; the rest is folded by group.
BASIC = (
    "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size", "gradient_accumulation_steps",
    "max_iters", "dtype", "compile", "activation_checkpointing", "loss_chunk_size", "optimizer", "price_per_hour",
    "price_per_kwh", "currency",
)  # fmt: skip
# Where a slider of a knob begins and ends, and how its stops grow; the number beside it takes the knob's whole range.
_SPANS: dict[str, tuple[float, float, str]] = {
    "n_layer": (1, 64, "each"), "n_head": (1, 48, "each"), "n_embd": (64, 6144, "by64"),
    "block_size": (64, 65_536, "doubling"), "vocab_size": (256, 262_144, "doubling"), "batch_size": (1, 256, "halves"),
    "gradient_accumulation_steps": (1, 1024, "halves"), "max_iters": (100, 1_000_000, "decades"),
    "loss_chunk_size": (0, 16_384, "doubling"), "price_per_kwh": (0, 0.6, "cents"), "price_per_hour": (0, 4, "dimes"),
    "dropout": (0, 0.5, "dimes"), "checkpointed_blocks": (0, 64, "each"), "warmup_iters": (0, 10_000, "decades"),
    "learning_rate": (1e-5, 1e-1, "decades"), "eval_interval": (10, 100_000, "decades"),
    "eval_iters": (1, 1000, "decades"), "activation_memory_budget": (0, 1, "dimes"),
    "co2_per_kwh": (0, 1000, "fifties"),
}  # fmt: skip
_STEPS = {"each": 1, "by64": 64, "cents": 0.02, "dimes": 0.1, "fifties": 50}
_GROWTH = {"doubling": (1.0,), "halves": (1.0, 1.5)}


def fields() -> list[dict[str, Any]]:
    """Every knob that has an effect, as JSON: the basic ones first, then by group."""
    shown = [knob for knob in KNOBS.values() if not knob.inert]
    rank = {name: place for place, name in enumerate(BASIC)}
    shown.sort(key=lambda knob: (rank.get(knob.name, len(BASIC)), GROUPS.index(knob.group)))
    return [_field(knob) for knob in shown]


def _field(knob: Knob) -> dict[str, Any]:
    limits = _limits(knob.name)
    return {
        "name": knob.name, "group": knob.group, "help": knob_help(knob.name, knob.help),
        "unit": knob_unit(knob.unit), "type": knob.type,
        "default": knob.default, "limits": knob.limits if knob.limits != knob.help else "", "ours": knob.ours,
        "choices": list(get_args(RunConfig.model_fields[knob.name].annotation)), "basic": knob.name in BASIC,
        "stops": stops(knob.name), **limits,
    }  # fmt: skip


def _limits(name: str) -> dict[str, float]:
    """The number that a knob begins and ends with, both allowed; what is open at an end is left to the server."""
    found: dict[str, float] = {}
    for constraint in RunConfig.model_fields[name].metadata:
        for sign, key in (("ge", "least"), ("le", "most")):
            value = getattr(constraint, sign, None)
            if value is not None:
                found[key] = value
    return found


def stops(name: str) -> list[float]:
    """The values that a slider of this knob stops at; none where it has no slider."""
    if name not in _SPANS:
        return []
    low, high, kind = _SPANS[name]
    if kind in _STEPS:
        step = _STEPS[kind]
        return [round(low + i * step, 6) for i in range(round((high - low) / step) + 1)]
    first = [0.0] if low == 0 else []
    least = max(low, 1) if low >= 1 or low == 0 else low
    grown = _decades(least, high) if kind == "decades" else _powers(least, high, _GROWTH[kind])
    values = first + [value for value in grown if least <= value <= high]
    whole = KNOBS[name].type == "int"
    return sorted({int(value) if whole else value for value in values if not whole or value == int(value)})


def _powers(low: float, high: float, factors: tuple[float, ...]) -> list[float]:
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    return [2.0**power * factor for power in powers for factor in factors]


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 3, 5, 7, 10, 20, … between two ends."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in (1, 1.5, 2, 3, 4, 5, 6, 8)]
