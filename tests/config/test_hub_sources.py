"""Where a model's config.json is found: presets, folders, files, repositories (by a hub that the tests stand in for)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.base.errors import ExitCode, UserError
from foretrain.config.hub.parameters import parameter_count, parameters_of
from foretrain.config.hub.source import facts_of, find_source
from foretrain.config.presets import model_named, models
from tests.kit.command import refused
from tests.kit.hub import counted, named_shapes

_TINY = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


def test_presets_have_the_published_number_of_parameters() -> None:
    assert len(models()) >= 25
    for preset in models().values():
        if facts := facts_of(preset.config, preset.name):
            assert parameter_count(facts) == preset.parameters, preset.name


KNOWN = [name for name, preset in models().items() if facts_of(preset.config, name)]


@pytest.mark.parametrize("name", [name for name in models() if name not in KNOWN])
def test_presets_without_facts_are_counted_by_transformers(name: str) -> None:
    assert counted(models()[name].config) == models()[name].parameters


@pytest.mark.parametrize("name", KNOWN)
def test_presets_at_full_size_are_the_model_of_transformers(name: str) -> None:
    preset = models()[name]
    facts = facts_of(preset.config, preset.name)
    assert facts
    assert [(each.name, each.shape) for each in parameters_of(facts)] == named_shapes(preset.config)


def test_a_preset_is_found_by_its_name_and_its_repositories() -> None:
    for word in ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B", "https://huggingface.co/Qwen/Qwen3-0.6B/"):
        found = find_source(word)
        assert (found.name, found.config["hidden_size"], found.code) == ("qwen3-0.6b", 1024, False)
    assert find_source("hf:meta-llama/Llama-3.2-1B-Instruct").where == "hf:meta-llama/Llama-3.2-1B-Instruct"
    words = [word.lower() for preset in models().values() for word in (preset.repository, *preset.same_as)]
    assert len(words) == len({*words})
    assert model_named("nobody/nothing") is None


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_TINY, "auto_map": {"AutoModelForCausalLM": "code.Model"}}))
    for path in (folder, folder / "config.json"):
        found = find_source(str(path))
        assert (found.name, found.code) == ("mine", True)
        assert found.facts.n_embd == 64
    (tmp_path / "small.json").write_text(json.dumps({**_TINY, "model_type": "mamba"}))
    unknown = find_source(str(tmp_path / "small.json"))
    assert (unknown.name, unknown.facts, unknown.config["hidden_size"]) == ("small", None, 64)


def adapter(folder: Path, base: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    return folder


def test_an_adapter_is_followed_to_its_model(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(_TINY))
    assert find_source(str(adapter(tmp_path / "a", "Qwen/Qwen3-8B"))).name == "qwen3-8b"
    assert find_source(str(adapter(tmp_path / "b", "../base"))).name == "base"
    assert find_source(str(adapter(tmp_path / "c", str(tmp_path / "b")))).name == "base"


@pytest.mark.parametrize("base", ["nobody/nothing", "", None, 5, "../self"])
def test_an_adapter_without_its_model_is_one_sentence(tmp_path: Path, base: Any) -> None:
    with refused(code=ExitCode.USAGE) as error:
        find_source(str(adapter(tmp_path / "self", base)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "nothing",
        "qwen3-0.7b",
        "owner/name",
        "hf:",
        "hf:a",
        "hf:a/b/c",
        "hf:../../etc",
        "x" * 5000,
        "a\0b",
        "~nobody/x",
    ],
)
def test_what_names_no_model_is_one_sentence(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code=ExitCode.USAGE) as error:
        find_source(word)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        find_source(str(tmp_path))


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """A hub that gives this path, or raises this; the calls that came."""
    calls: list[tuple[Any, ...]] = []

    def download(*words: Any, **options: Any) -> str:
        calls.append(words)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    def metadata(address: str, *, timeout: float) -> None:
        if isinstance(answer, Exception):
            raise answer

    there = SimpleNamespace(
        hf_hub_download=download, get_hf_file_metadata=metadata, hf_hub_url=lambda *words: "/".join(words),
        try_to_load_from_cache=lambda *words: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "huggingface_hub", there)
    return calls


def test_of_a_repository_config_json_alone_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_TINY))
    calls = hub(monkeypatch, tmp_path / "config.json")
    found = find_source("hf:owner/name")
    assert calls == [("owner/name", "config.json")]
    assert (found.name, found.where) == ("name", "hf:owner/name")


def hub_error(name: str) -> Exception:
    """An error of the library, without the answer of a server that it takes."""
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = ("no\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("name", "code", "named"),
    [
        ("GatedRepoError", ExitCode.USAGE, "agreement"),
        ("RepositoryNotFoundError", ExitCode.USAGE, "no such repository"),
        ("RemoteEntryNotFoundError", ExitCode.USAGE, "has no config.json"),
        ("LocalEntryNotFoundError", ExitCode.ENVIRONMENT, "cannot be fetched"),
        ("OfflineModeIsEnabled", ExitCode.ENVIRONMENT, "cannot be fetched"),
        ("HfHubHTTPError", ExitCode.ENVIRONMENT, "cannot be fetched"),
    ],
)
def test_a_hub_that_does_not_answer_says_how_to_give_a_file(
    name: str, code: ExitCode, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, hub_error(name))
    with refused(code=code) as error:
        find_source("hf:owner/name")
    assert named in str(error.value)
    assert "path of" in str(error.value)
    assert "\n" not in str(error.value)


def test_without_the_package_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused(code=ExitCode.ENVIRONMENT, match="pip install huggingface-hub"):
        find_source("hf:owner/name")
    assert find_source("hf:Qwen/Qwen3-8B").name == "qwen3-8b"


def test_a_config_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(_TINY))
    code = "from foretrain.config.hub.source import find_source; print(find_source('hf:owner/name').facts.n_embd)"
    own = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    assert done.stdout == "64\n"
