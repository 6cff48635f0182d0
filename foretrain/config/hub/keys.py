"""`Keys`: the values of a config.json, each checked; what is missing or null takes transformers' default."""

import json
import math
from collections.abc import Mapping
from typing import Any

from foretrain.base.errors import UserError

MOST_LAYERS = 256  # the deepest published decoder has 126; each layer of a plan takes a hundredth of a second
MOST_WIDE = 2**20
MOST_TOKENS = 2**26  # of a vocabulary
MOST_POSITIONS = 2**31
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
POSITIONS = (*POSITIONS, "max_decoder_position_embeddings")
_SHOWN_CHARACTERS = 40


class Unknown(Exception):
    """A part that foretrain has no facts of; the model can still be traced."""


def shown(value: Any) -> str:
    """A value as JSON has it, for a sentence: ASCII, and not longer than a line can bear."""
    try:
        if isinstance(value, int) and abs(value) > 10**_SHOWN_CHARACTERS:
            return f"a number of about {math.log10(abs(value)):.0f} digits"
        text = json.dumps(value, default=lambda each: type(each).__name__)
    except (ValueError, RecursionError, OverflowError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class Keys:
    """A table of a config.json, read key by key. `where` is named in what is wrong with it."""

    def __init__(self, config: Mapping[str, Any], where: str, family: str) -> None:
        self.config, self.where, self.family = config, where, family

    def has(self, *names: str) -> bool:
        return any(self.config.get(name) is not None for name in names)

    def whole(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST_WIDE) -> int:
        """A whole number by the first of these names that is there; without a default it must be there."""
        name, value = self._first(names)
        if value is None:
            if default is None:
                raise UserError("config.hub_missing", where=self.where, key=names[0], family=self.family)
            return default
        if type(value) is not int or not least <= value <= most:
            raise UserError(
                "config.hub_bad_size", where=self.where, key=name, value=shown(value), least=least, most=most
            )
        return value

    def layers(self, *names: str) -> int:
        return self.whole(*names, most=MOST_LAYERS)

    def number(self, name: str, default: float, *, least: float = 0.0, most: float = 1e9) -> float:
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise UserError(
                "config.hub_bad_number", where=self.where, key=name, value=shown(value), least=least, most=most
            )
        return float(value)

    def share(self, *names: str, default: float = 0.0) -> float:
        name, value = self._first(names)
        return default if value is None else self.number(name, default, most=1.0)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError("config.hub_bad_flag", where=self.where, key=name, value=shown(value))
        return value

    def word(self, *names: str, default: str) -> str:
        name, value = self._first(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise UserError("config.hub_bad_text", where=self.where, key=name, value=shown(value))
        return value

    def table(self, name: str) -> "Keys":
        value = self.config.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise UserError("config.hub_bad_table", where=self.where, key=name, value=shown(value))
        return Keys(value, self.where, self.family)

    def listed(self, name: str, count: int, *, exactly: bool = True) -> list[Any] | None:
        """A list with one entry a layer; None where it is missing."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or (exactly and len(value) != count):
            found = len(value) if isinstance(value, list) else shown(value)
            raise UserError("config.hub_bad_list", where=self.where, key=name, found=found, count=count)
        return value[:count]

    def numbers_of_layers(self, name: str, count: int) -> frozenset[int]:
        value = self.config.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each < count for each in value):
            raise UserError("config.hub_bad_layers", where=self.where, key=name, value=shown(value), last=count - 1)
        return frozenset(value)

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        return names[0], None
