"""The presets of models.toml: models that people use, by name or by the repository that they stand in."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from foretrain.base.records import Record


class ModelPreset(Record):
    """A published model: its name here, its repository and others of the same sizes, and its config.json."""

    name: str
    repository: str
    same_as: tuple[str, ...] = ()
    parameters: int  # as published, a tied head counted once
    config: dict[str, object]


@cache
def _text() -> str:
    return Path(__file__).with_name("models.toml").read_text("utf-8")


@cache
def models() -> Mapping[str, ModelPreset]:
    """The presets by name, in the order of models.toml."""
    found = tomllib.loads(_text())
    return {
        name: ModelPreset.model_validate({"name": name, **table, "config": _nulls(table["config"])})
        for name, table in found.items()
    }


def _nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null, so models.toml writes it as a text."""
    return {
        key: None if value == "null" else _nulls(value) if isinstance(value, dict) else value
        for key, value in table.items()
    }


@cache
def _spellings() -> Mapping[str, str]:
    return {
        word.lower(): preset.name
        for preset in models().values()
        for word in (preset.name, preset.repository, *preset.same_as)
    }


def model_named(word: str) -> ModelPreset | None:
    """The preset of this name or repository, in any case; None where there is none."""
    word = re.sub(r"(?<=.)(-unsloth)?-bnb-4bit$", "", word, flags=re.IGNORECASE)
    if word.lower().startswith("unsloth/") and word.lower() not in _spellings():  # the model itself, under its name
        copied = word.partition("/")[2].lower()
        word = next((each for each in _spellings() if each.partition("/")[2] == copied), word)
    if word.lower() not in _text().lower():  # most words are presets of ours, for whom nothing need be parsed
        return None
    name = _spellings().get(word.lower())
    return models()[name] if name else None
