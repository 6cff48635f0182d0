"""The options of `foretrain plan --inference` among the words of the command line; the others are the model's."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.messages import listed
from foretrain.config.inference.formats import ENGINES
from foretrain.config.inference.options import Inference

MOST_DIGITS = 12
_ALIASES = {"dtype": "weights", "context_length": "context", "ctx": "context", "kv_cache": "kv"}


def parse_inference(words: Sequence[str]) -> tuple[Inference, list[str]]:
    """What is asked, and the words that are left. Raises UserError for a value that cannot be."""
    found: dict[str, str] = {}
    left: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        option = _option(name)
        if option is None:
            left.append(word)
        elif equals or waiting:
            found[option] = value if equals else waiting.pop(0)
        else:
            raise UserError("usage.requires_argument", option=f"--{option}", command="foretrain plan")
    return asked_with(found), left


def _option(word: str) -> str | None:
    name = word.removeprefix("--").replace("-", "_")
    name = _ALIASES.get(name, name)
    return name if word.startswith("--") and name in Inference.model_fields else None


def asked_with(values: Mapping[str, Any]) -> Inference:
    """The record of values by option, as texts or numbers. Raises UserError."""
    unknown = [name for name in values if name not in Inference.model_fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], Inference.model_fields, n=1)
        raise UserError(
            "usage.inference_unknown", name=unknown[0][:40], choices=listed(near or list(Inference.model_fields))
        )
    given = {name: _number(name, value) for name, value in values.items()}
    try:
        return Inference.model_validate(given)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise UserError(
            "usage.inference_value", option=f"--{name}", value=str(given[name])[:40], expected=_expected(name)
        ) from None


def _number(name: str, value: Any) -> Any:
    """A count of an option that is one: 8192, 8,192, or 32k, which of a context means 32 · 1024."""
    if Inference.model_fields[name].annotation is not int or not isinstance(value, str):
        return value
    text = value.strip().lower().replace(",", "").replace("_", "")
    digits, thousand = text.removesuffix("k"), text.endswith("k")
    if not digits.isdecimal() or len(digits) > MOST_DIGITS or int(digits) == 0:
        raise UserError("usage.inference_value", option=f"--{name}", value=value[:40], expected=_expected(name))
    return int(digits) * (1024 if thousand else 1)


def _expected(name: str) -> str:
    most = next((each.le for each in Inference.model_fields[name].metadata if hasattr(each, "le")), None)
    return f"1 - {most:,}" if most is not None else listed(list(ENGINES))
