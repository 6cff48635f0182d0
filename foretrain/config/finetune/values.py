"""`converted`: the value of an option of `FineTune` from what a file or the command line says, checked.

Trainers take many spellings: 2e-5 is a text in YAML 1.1, 1.0 a number of epochs, bf16 a dtype, adamw_hf an optimizer.
"""

import re
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.messages import listed, say
from foretrain.base.quantities import parse_count
from foretrain.config.checks import value_as_written
from foretrain.config.finetune.options import (
    FINETUNE_OPTIONS,
    NAMES_OF_OPTIM,
    NAMES_OF_TRAINING,
    FineTune,
    FineTuneOption,
)

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
# torchao's optimizers, whose states have at most as many bytes as those of what is planned instead.
_NEAR = dict.fromkeys(
    (f"{name}_{kind}" for name in ("adamw_torch", "ao_adamw") for kind in ("8bit", "4bit", "fp8")), "adamw_torch"
)
_PLAIN_NAMES = re.compile(r"[\w.-]*")


class NotPlanned(Exception):
    """A value that a trainer knows, and that foretrain does not plan; its text is what is planned instead."""


class Expected:
    """What an option takes, said in the language of who reads it."""

    def __init__(self, option: FineTuneOption) -> None:
        self.option = option

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __str__(self) -> str:
        option = self.option
        low, high = limits(option.name)
        if option.type == "choice":
            return say("expects.one_of", choices=listed(option.choices))
        if option.type in ("bool", "str"):
            return say(f"expects.{option.type}")
        whole = option.type == "int"
        if high is None:
            text = "" if low is None else say("expects.at_least", low=f"{low:g}")
            return say("expects.whole" if whole else "expects.number", limits=text).rstrip()
        return say("expects.whole_range" if whole else "expects.number_range", low=f"{low:g}", high=f"{high:,}")


def limits(name: str) -> tuple[float | None, float | None]:
    """The least and the most that an option may be; None where it has no such limit."""
    found = FineTune.model_fields[name].metadata
    low = next((each.ge for each in found if hasattr(each, "ge")), None)
    high = next((getattr(each, "le", getattr(each, "lt", None)) for each in found
                 if hasattr(each, "le") or hasattr(each, "lt")), None)  # fmt: skip
    return low, high


def bad_value(name: str, value: Any, key: str, source: str) -> UserError:
    """An option that cannot have this value."""
    expects = Expected(FINETUNE_OPTIONS[name])
    return UserError("config.bad_value", key=key, value=value_as_written(value), expects=expects, source=source)


def flag(value: Any) -> bool | None:
    """true or false of what trainers take for it; None of anything else."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    word = value.lower() if isinstance(value, str) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def number(value: Any) -> float | None:
    """A number, or a text that is one; None of anything else, of infinity and of what is no number."""
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -1e300 < value < 1e300 else None


def converted(name: str, value: Any, key: str, source: str) -> Any:
    """The value of this option. Raises UserError, and NotPlanned for a choice that a trainer may well know."""
    option = FINETUNE_OPTIONS[name]
    if option.type == "choice":
        return _choice(option, value, key, source)
    found: Any = None
    if option.type == "bool":
        found = flag(value)
    elif option.type == "str":
        found = _names(value)
    else:
        found = _count(value) if name == "dataset_tokens" else number(value)
        if option.type == "int" and found is not None:
            found = int(found) if found == int(found) else None
    low, high = (None, None) if found is None or option.type in ("bool", "str") else limits(name)
    if found is None or (low is not None and found < low) or (high is not None and found > high):
        raise bad_value(name, value, key, source)
    if option.type == "float" and high == found and not _may_equal(name):
        raise bad_value(name, value, key, source)
    return found


def _count(value: Any) -> float | None:
    """A number of tokens, which may be written as 10M or 3.68B."""
    found = number(value)
    if found is None and isinstance(value, str):
        try:
            return parse_count(value)
        except ValueError:
            return None
    return found


def _may_equal(name: str) -> bool:
    """Whether an option may be as large as its upper limit."""
    return not any(hasattr(each, "lt") for each in FineTune.model_fields[name].metadata)


def _choice(option: FineTuneOption, value: Any, key: str, source: str) -> str:
    if not isinstance(value, str):
        if isinstance(value, bool) and not value:
            value = "no"
        else:
            raise bad_value(option.name, value, key, source)
    word = value.strip().removeprefix("torch.")
    if option.name == "optim":
        word = NAMES_OF_OPTIM.get(word.lower(), word.lower())
    elif option.name == "training":
        word = NAMES_OF_TRAINING.get(word.lower(), word.lower())
    elif option.name == "dtype":
        word = _DTYPES.get(word.lower(), word.lower())
    if word in option.choices:
        return word
    raise NotPlanned(_NEAR.get(word, ""))


def _names(value: Any) -> str | None:
    """Names parted by commas, of a text or a list. Raises NotPlanned for a pattern."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return None
    found = [word.strip() for word in words if word.strip()]
    if not all(_PLAIN_NAMES.fullmatch(word) for word in found):
        raise NotPlanned  # a pattern of peft's
    return ",".join(found)
