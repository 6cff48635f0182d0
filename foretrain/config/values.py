"""`converted`: the value of an option from a trainer's file or the command line (where 2e-5 is a text), checked."""

import re
from typing import Any

from foretrain.base.quantities import parse_count
from foretrain.config.checks import bad_value, value_as_written
from foretrain.config.option import Option

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null")
# torchao's optimizers, whose states have at most as many bytes as those of what is planned instead.
_NEAR = dict.fromkeys(
    (f"{name}_{kind}" for name in ("adamw_torch", "ao_adamw") for kind in ("8bit", "4bit", "fp8")), "adamw_torch"
)
_PLAIN_NAMES = re.compile(r"[\w.-]*")


class NotPlanned(Exception):
    """A value that a trainer knows, and that foretrain does not plan; its text is what is planned instead."""


def flag(value: Any) -> bool | None:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    word = value.lower() if isinstance(value, str) else ""
    return True if word in TRUE else False if word in FALSE else None


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


def converted(option: Option, value: Any, key: str, source: str) -> Any:
    """The value of this option. Raises UserError, and NotPlanned for a choice that a trainer may well know."""
    found: Any
    if option.type == "choice":
        found = _choice(option, value)
    elif option.type == "bool":
        found = flag(value)
    elif option.type == "str":
        found = _names(value)
    else:
        found = number(value)
        if found is None and option.thousand and isinstance(value, str):
            found = _count(value, option.thousand)
        whole = option.type == "int"
        if found is None or (whole and found != int(found)) or not option.allows(found):
            found = None
        elif whole:
            found = int(found)
    if found is None:
        raise bad_value(option, value, value_as_written(value), source, key)
    return found


def _count(text: str, thousand: int) -> float | None:
    """A number of tokens, which may be written as 10M or 3.68B; where k stands for 1024, as 8,192 or 32k."""
    if thousand == 1024:
        digits = text.strip().lower().replace(",", "")
        found = number(digits.removesuffix("k"))
        return found and found * (thousand if digits.endswith("k") else 1)
    try:
        return parse_count(text)
    except ValueError:
        return None


def _choice(option: Option, value: Any) -> str | None:
    if not isinstance(value, str):
        return None if value or not isinstance(value, bool) else _choice(option, "no")
    word = value.strip().removeprefix("torch.")
    word = option.choice_names.get(word.lower(), word.lower() if option.choice_names else word)
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
