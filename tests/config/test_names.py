"""What somebody types for a model or an option, and what is said where there is no such thing."""

import json
from pathlib import Path

import pytest

from foretrain.base.errors import ConfigError
from foretrain.config.presets import GPT2_SHAPES, PRESET_ALIASES
from foretrain.config.resolve import resolve
from tests.kit.command import foretrain


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


@pytest.mark.parametrize("name", ["own.toml", "own.py"])
def test_a_number_in_quotes_is_not_a_number(own_directory: Path, name: str) -> None:
    Path(name).write_text('n_layer = "6"\n')
    assert "n_layer = '6'" in said(name)
    assert f"{name}:1" in said(name)
    assert resolve(["--n_layer", "6"]).config.n_layer == 6


def test_an_option_that_is_typed_twice_is_noted() -> None:
    found = resolve(["baby", "--batch_size=8", "--batch_size=16"])
    assert found.config.batch_size == 16
    assert [note.id for note in found.notes] == ["config.typed_twice"]
    assert "--batch_size=16" in str(found.notes[0])
    assert not resolve(["baby", "--batch_size=8", "--batch_size=8"]).notes  # over a preset it is what one types it for
