"""What a config must not be accepted with, said without foretrain's own checks.

Limits are those of the mathematics and of nanoGPT's train.py: a size is a whole number from 1 on, heads divide the
width, a rate is finite, warm-up ends before the run does. Texts are read by the standard library alone (tomllib, ast).
Where a part cannot be read so, its keys are unknown and nothing is said of them.
"""

import ast
import math
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from foretrain.config.presets import PRESETS
from tests.faults.grammar import Case

UNKNOWN = object()
SIZES = (
    "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size", "gradient_accumulation_steps", "max_iters",
    "lr_decay_iters", "eval_interval", "eval_iters", "log_interval", "keep_checkpoints",
)  # fmt: skip
COUNTS = (
    "warmup_iters", "seed", "total_batch_size", "loss_chunk_size", "checkpointed_blocks", "eval_sequences",
    "eval_batch_size", "eval_block_size", "cpu_threads",
)  # fmt: skip
POSITIVE = ("learning_rate", "muon_learning_rate", "cooldown")
NOT_NEGATIVE = ("min_lr", "weight_decay", "grad_clip", "price_per_kwh", "price_per_hour", "co2_per_kwh")
SHARES = ("dropout", "beta1", "beta2", "muon_momentum")  # from 0, below 1
SWITCHES = ("bias", "compile", "decay_lr", "eval_only", "always_save_checkpoint", "master_weights")
WORDS = {
    "dtype": ("auto", "float32", "bfloat16", "float16"), "recipe": ("nanogpt", "modern", "llama", "nanochat"),
    "optimizer": ("adamw", "adamw8bit", "adamw4bit", "muon"), "on_nonfinite": ("stop", "skip"), "lr_schedule": ("cosine", "linear"),
    "data_order": ("random", "epochs"),
}  # fmt: skip
# karpathy/nanoGPT train.py, as far as the rules over several knobs need them.
NANOGPT = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 12, "max_iters": 600_000,
    "gradient_accumulation_steps": 40, "learning_rate": 6e-4, "min_lr": 6e-5, "warmup_iters": 2000,
    "lr_decay_iters": 600_000, "decay_lr": True, "eval_only": False, "eval_block_size": 0, "total_batch_size": 0,
    "dropout": 0.0, "bias": False, "compile": True, "init_from": "scratch", "recipe": "nanogpt",
}  # fmt: skip
TEXTS = (*WORDS, "device", "memory_limit", "init_from")  # what is typed for these is not evaluated
OTHER_NAMES = {"micro_batch_size": "batch_size", "gradient_checkpointing": "activation_checkpointing"}
_EVALUATED = re.compile(r"[-+*/~(]|\bnot\b|^\s*(true|false|yes|no|on|off|auto)\s*$", re.IGNORECASE)
GROUPS = ("model", "data", "batch", "optimizer", "evaluation", "run", "system", "cost")


def said_by(case: Case) -> dict[str, Any] | None:
    """The values that a case sets, the last one of each key; None where a whole part cannot be read."""
    values: dict[str, Any] = {}
    for kind, text in case.parts:
        if kind == "preset":
            values |= PRESETS[text]
        elif kind == "override":
            key, equals, value = text.partition("=")
            if not equals:
                return None
            values[_name(key)] = value if _name(key) in TEXTS and value[:1] not in ("'", '"') else _typed(value)
        else:
            found = _toml(case.files[text]) if text.endswith(".toml") else _python(case.files[text])
            if found is None:
                return None
            values |= {_name(key): value for key, value in found.items()}
    return values


def _name(key: str) -> str:
    key = key.lstrip("-").replace("-", "_")
    return OTHER_NAMES.get(key, key)


def _typed(text: str) -> Any:
    """A value after --key=: a literal of Python, as nanoGPT reads it, a number that is none, or just text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return float(text)
    except ValueError:
        # Arithmetic is allowed there, and 'true' is a switch: what it comes to is not the oracle's to say.
        return UNKNOWN if _EVALUATED.search(text) else text


def _toml(data: bytes) -> dict[str, Any] | None:
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if key == "preset":
            if not isinstance(value, str) or value.lower() not in PRESETS:
                return None
            values |= PRESETS[value.lower()]
        else:
            values |= value if key in GROUPS and isinstance(value, dict) else {key: value}
    return values


def _python(data: bytes) -> dict[str, Any] | None:
    """Plain assignments of literals; everything else leaves its name unknown, a statement of another kind the whole."""
    try:
        tree = ast.parse(data.decode("utf-8-sig"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    values: dict[str, Any] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                try:
                    values[name] = ast.literal_eval(value)
                except (ValueError, TypeError, RecursionError, MemoryError):
                    values[name] = UNKNOWN
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                return None
    return values


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                return float(value)
            except ValueError:
                return None
    return value if isinstance(value, int | float) else None


def _alone(key: str, value: Any) -> str | None:
    if key in (*SIZES, *COUNTS):
        if key == "batch_size" and isinstance(value, str) and value.strip().lower() == "auto":
            return None
        number = _number(value)
        if number is None or number != number or abs(number) == math.inf or number != int(number):
            return "no whole number"
        return "beyond 64 bits" if abs(number) >= 2**63 else "too small" if number < (key in SIZES) else None
    if key in (*POSITIVE, *NOT_NEGATIVE, *SHARES):
        number = _number(value)
        if number is None or number != number or abs(number) == math.inf:
            return "no finite number"
        if number < 0 or (number == 0 and key in POSITIVE):
            return "too small"
        return "not below 1" if key in SHARES and number >= 1 else None
    if key in SWITCHES:
        fine = isinstance(value, bool) or str(value).strip().lower() in (
            "true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n", "1.0", "0.0", "-0.0"
        )  # fmt: skip
        return None if fine else "neither true nor false"
    if key in WORDS:
        return None if value in WORDS[key] else "no such choice"
    return _text(key, value)


def _text(key: str, value: Any) -> str | None:
    if key == "device":
        fine = isinstance(value, str) and re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", value)
        return None if fine else "no device"
    if key == "memory_limit" and value != "":
        match = re.fullmatch(r"\s*([0-9_.eE+]+)\s*([kmgt]i?b|b)?\s*", str(value), re.I)
        if match is None or not isinstance(value, str):
            return "no size"
        try:
            unit = (match[2] or "b").lower()
            size = float(match[1]) * (1024 if "i" in unit else 1000) ** " kmgt".index(unit[0].replace("b", " "))
            return None if 0 < size < 1e19 else "no possible size"
        except ValueError:
            return "no size"
    return None


def _together(values: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(the knobs, what is wrong with them together), of values that are right alone."""
    v = {**NANOGPT, **values}
    n = {key: _number(v[key]) for key in NANOGPT}
    if n["n_embd"] % n["n_head"]:  # type: ignore[operator]
        yield ("n_embd", "n_head"), "heads do not divide the width"
    if (n["eval_block_size"] or 0) > n["block_size"]:  # type: ignore[operator]
        yield ("eval_block_size", "block_size"), "evaluation beyond the model's positions"
    auto = v["batch_size"] == "auto"
    unit = n["block_size"] * (1 if auto else n["batch_size"] or 1)  # type: ignore[operator]
    if n["total_batch_size"] and n["total_batch_size"] % unit:
        yield ("total_batch_size", "block_size", "batch_size"), "tokens that no micro-batches make"


def unreachable(case: Case) -> str | None:
    """Why this config cannot be run as it stands; None where it can, or where the oracle cannot say."""
    values = said_by(case)
    if values is None:
        return None
    recipe, init_from = values.get("recipe", "nanogpt"), values.get("init_from", "scratch")
    brought = ("n_layer", "n_head", "n_embd", "bias", "block_size", "vocab_size") if init_from != "scratch" else ()
    for key, value in values.items():
        if value is not UNKNOWN and key not in brought and (wrong := _alone(key, value)):
            return f"{key}: {wrong}"
    if recipe != "nanogpt" or init_from != "scratch" or any(v is UNKNOWN for k, v in values.items() if k in NANOGPT):
        return None
    return next((f"{', '.join(keys)}: {wrong}" for keys, wrong in _together(values)), None)


def changed(case: Case, config: dict[str, Any]) -> str | None:
    """A key that an accepted config has another value of than was written; None where all are as written."""
    values = said_by(case)
    if (
        values is None
        or values.get("recipe", "nanogpt") != "nanogpt"
        or values.get("init_from", "scratch") != "scratch"
    ):
        return None
    follows = {"batch_size", "gradient_accumulation_steps", "eval_sequences", "auto_batch_size", "total_batch_size"}
    for key, value in values.items():
        if value is UNKNOWN or key not in config or key in follows:
            continue
        now, number = config[key], _number(value)
        if isinstance(now, bool):
            same = now == (str(value).strip().lower() in ("true", "1", "yes", "on", "t", "y", "1.0"))
        elif isinstance(now, int | float):
            same = number is not None and float(now) == float(number)
        else:
            same = str(value) == now or not isinstance(value, str)  # --dataset=5 is the text 5
        if not same:
            return f"{key}: {value!r:.80} became {now!r:.80}"
    return None


def not_a_quantity(value: Any, path: str = "") -> str | None:
    """Where in a forecast a number is negative or none; None where all are quantities.

    What a change saves may be less than nothing, and a seed, a knob or a note's value is no forecast.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("config", "advice", "notes", "calibration") and (
                found := not_a_quantity(inner, f"{path}.{key}")
            ):
                return found
    elif isinstance(value, list):
        for inner in value:
            if found := not_a_quantity(inner, f"{path}[]"):
                return found
    elif isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < math.inf:
        return f"{path} = {value}"
    return None
