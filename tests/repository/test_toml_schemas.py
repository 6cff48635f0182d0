"""The schemas that editors check TOML by say what foretrain says, of every example and of every option."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretrain.base.errors import ConfigError, UserError
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import ALIASES, from_text, to_toml, toml_value
from foretrain.hardware import catalogue
from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "docs"))
import toml_schemas

CHECKS = {
    name: jsonschema.Draft7Validator(json.loads(toml_schemas.path_of(name).read_text("utf-8")))
    for name in toml_schemas.SCHEMAS
}
EXAMPLES = sorted((REPO / "examples").rglob("*.toml"))


def valid(text: str, name: str = "config") -> bool:
    return CHECKS[name].is_valid(tomllib.loads(text))


def accepted(text: str) -> bool:
    try:
        from_text(text, "x.toml")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", CHECKS)
def test_they_are_schemas(name: str) -> None:
    jsonschema.Draft7Validator.check_schema(CHECKS[name].schema)
    assert CHECKS[name].schema["$id"].startswith("https://json.schemastore.org/")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    CHECKS["config"].validate(tomllib.loads(path.read_text("utf-8")))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_written_out_is_valid(name: str) -> None:
    CHECKS["config"].validate(tomllib.loads(to_toml(RunConfig.model_validate(PRESETS[name]))))
    CHECKS["config"].validate({"preset": name})


def wrong_values(name: str) -> list[Any]:
    """Values of the wrong type, and those just beyond an option's limits."""
    known = OPTIONS[name]
    found: list[Any] = {
        "int": [True, 1.5, "1", []], "float": [True, "0.1", []], "bool": ["maybe", []], "str": [True, []],
        "choice": [True, "no such", []],
    }[known.type]  # fmt: skip
    if known.is_switch and known.type == "choice":
        found = [value for value in found if value is not True]
    if known.adds:  # a list of them is one, too
        found = [[True] if value == [] else value for value in found]
    step = 1 if known.type == "int" else 1e-9
    found = [*found, *([known.least - step] if known.least is not None else [])]
    found += [known.above] if known.above is not None else []
    found += (
        [known.most + max(step, abs(known.most) * 1e-6)] if known.most is not None and known.type == "float" else []
    )
    found += [known.most + 1] if known.most is not None and known.type == "int" else []
    return found + ([known.below] if known.below is not None else [])


@pytest.mark.parametrize("name", OPTIONS)
def test_schema_refuses_what_foretrain_refuses(name: str) -> None:
    default = f"{name} = {toml_value(OPTIONS[name].default)}\n"
    assert valid(default)
    for value in wrong_values(name):
        text = f"{name} = {toml_value(value) if not isinstance(value, list) else str(value).lower()}\n"
        assert not valid(text), text
        assert not accepted(text), text


def test_schema_knows_spellings_groups_and_auto() -> None:
    for alias, name in ALIASES.items():
        assert valid(f"{alias} = {toml_value(OPTIONS[name].default)}\n"), alias
    assert valid('[batch]\nbatch_size = "auto"\n')
    assert accepted('[batch]\nbatch_size = "auto"\ntotal_batch_size = 524288\n')
    for text in ("n_layers = 12\n", "[modell]\nn_layer = 12\n", 'preset = "gpt5"\n'):
        assert not valid(text)
        assert not accepted(text)


CARD = '["Mine"]\nmemory_gib = 12\ncompute_capability = "8.9"\n'


@pytest.mark.parametrize(
    "text",
    [
        CARD, CARD + "bandwidth_gb_per_s = 504\n", CARD + 'aliases = ["m"]\n', CARD.replace("12", "0"),
        CARD.replace("8.9", "89"), CARD.replace("memory_gib = 12\n", ""), CARD + "bandwith = 5\n", CARD + "sm_count = 1e7\n",
    ],
)  # fmt: skip
def test_a_card_file_is_valid_where_foretrain_takes_it(text: str, monkeypatch: Any) -> None:
    Path("cards.toml").write_text(text)
    monkeypatch.setenv(catalogue.GPU_FILE_VARIABLE, str(Path("cards.toml").absolute()))
    try:
        taken = "Mine" in catalogue.catalogue()
    except UserError:
        taken = False
    assert valid(text, "cards") == taken


def test_a_mixture_is_valid() -> None:
    assert valid('[weights]\n"fineweb-edu" = 0.7\nmine = 3\n', "mixture")
    for text in ("", "[weights]\n", "[weights]\na = -1\n", "[weights]\na = 1\n[more]\n"):
        assert not valid(text, "mixture")
