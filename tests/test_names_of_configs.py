"""What somebody types for a model or an option, and what is said where there is no such thing."""

import json

import pytest

from foretrain.configfile import resolve
from foretrain.errors import ConfigError
from foretrain.presets import GPT2_SHAPES, PRESET_ALIASES
from tests.helpers import foretrain


@pytest.mark.parametrize("name", GPT2_SHAPES)
def test_the_names_that_everybody_knows_are_presets(name: str) -> None:
    found = resolve([name.upper(), "--batch_size=1"])
    assert found.config == resolve([PRESET_ALIASES[name], "--batch_size=1"]).config
    assert {key: getattr(found.config, key) for key in GPT2_SHAPES[name]} == GPT2_SHAPES[name]
    assert json.loads(foretrain("plan", name, "--gpu", "H200", "--json").stdout)["name"] == PRESET_ALIASES[name]


def said(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(words)
    return str(caught.value)


def test_near_names_are_offered() -> None:
    assert "gpt2-xl" in said("gpt2-xll")
    assert "gpt2-medium" in said("gpt2-medum")
    assert "--help" in said("--hlep")
    assert "--help" in said("--hepl")
    assert "--help" not in said("--depht")


def test_an_address_is_shown_as_it_was_typed() -> None:
    address = "https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py"
    assert address in said(address)
    assert "https://github.com/karpathy" in said("https://github.com/karpathy")
