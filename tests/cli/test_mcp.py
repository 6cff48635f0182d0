"""`foretrain mcp`: what an agent gets of a command, and what it may not do. With the SDK its own client asks."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from foretrain.cli import app
from foretrain.cli.commands import mcp
from foretrain.cli.commands.mcp import Answer, answer
from tests.kit.command import foretrain

COMMANDS: Any = app.members()
TEXT = ("llama-3.1-8b", "--inference", "--gpu", "4070")
LOG = "step 0: train loss 4.3, val loss 4.2\niter 0: loss 4.3, time 900.00ms, mfu -100.00%\n"
AXOLOTL = "base_model: Qwen/Qwen3-0.6B\nadapter: lora\nsequence_len: 2048\nmicro_batch_size: 1\n"


def asked(name: str, *words: str, **text: str) -> Answer:
    return answer(COMMANDS[name], words, **text)


def test_an_answer_is_the_screen_and_the_json_of_the_command() -> None:
    found = asked("plan", *TEXT, "--weights", "q4_k_m")
    assert not found.failed
    assert found.text.startswith("llama-3.1-8b on RTX 4070")
    assert "\x1b" not in found.text
    assert found.value == json.loads(foretrain("plan", *TEXT, "--weights", "q4_k_m", "--json", code=0).stdout)
    checked = asked("plan", *TEXT, "--weights", "f16", "--check")
    assert not checked.failed  # it is answered: it does not fit
    assert "Does not fit" in checked.text


def test_the_text_of_a_config_is_read_as_its_file() -> None:
    found = asked("plan", "--gpu", "4070", config=AXOLOTL, config_name="../../some.yaml")
    assert found.value["name"].lower().endswith("qwen3-0.6b")
    assert "some.yaml as a file of axolotl" in found.text
    logged = asked("explain", "--gpu", "4070", config=LOG, config_name="out.log")
    assert logged.value["schema"] == "foretrain.explain/1#log"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt2-124m", "--gpu", "4071"), "No card named '4071'"),
        (("gpt2-124m", "--no-such=1"), "--no-such"),
        (("missing.toml", "--gpu", "4070"), "missing.toml"),
        (("gpt2-124m", "--", "--gpu", "4070"), "--gpu"),
    ],
)
def test_a_failure_is_the_one_sentence(words: tuple[str, ...], said: str) -> None:
    found = asked("plan", *words)
    assert found.failed
    assert said in found.text
    assert "Traceback" not in found.text


@pytest.mark.parametrize(
    "word", ["--write", "--write=x.toml", "--write-script", "--write-job", "--snapshot", "--python"]
)
def test_what_writes_or_starts_a_program_is_refused(word: str, own_directory: Path) -> None:
    found = asked("plan", "gpt2-124m", "--gpu", "4070", word, "x.toml")
    assert found.failed
    assert found.text.startswith(word.partition("=")[0] + " writes a file or starts a program")
    assert not list(own_directory.iterdir())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), ".."),
        ((), "a\0.toml"),
        ((), "\ud800"),
        ((), "x" * 300),
        (("\0",), ""),
        (("\ud800",), ""),
        (("x" * 10**6,), ""),
    ],
    ids=["parent", "nul", "surrogate", "long", "nul_word", "surrogate_word", "long_word"],
)
def test_what_no_process_can_be_given_is_said(words: tuple[str, ...], name: str) -> None:
    found = asked("plan", *words, config="n_layer = 2", config_name=name)
    assert found.failed
    assert found.text


def test_every_option_that_takes_a_path_is_known() -> None:
    """One that comes is refused, or added here because it is only read."""
    paths = {each.name for name in mcp.TOOLS for each in COMMANDS[name].params if isinstance(each.type, click.Path)}
    assert paths - set(mcp.REFUSED) == {"gpu_file"}
    assert set(mcp.REFUSED) <= {each.name for name in mcp.TOOLS for each in COMMANDS[name].params}


def test_too_large_a_config_and_too_slow_an_answer_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "larger than 1.0" in asked("plan", config="x" * (mcp.MOST_BYTES + 1)).text
    monkeypatch.setattr(mcp, "MOST_S", 1e-3)
    slow = asked("plan", *TEXT)
    assert slow.failed
    assert "No answer came" in slow.text


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert "pip install 'foretrain[mcp]'" in foretrain("mcp", code=4).stderr


def test_an_agent_lists_and_calls_the_tools() -> None:
    sdk, anyio = pytest.importorskip("mcp"), pytest.importorskip("anyio")

    async def ask() -> None:
        async with sdk.Client(mcp.server(app)) as client:
            tools = {each.name: each for each in (await client.list_tools()).tools}
            assert tools.keys() == set(mcp.TOOLS)
            assert all(each.annotations.read_only_hint for each in tools.values())
            assert "--method qlora" in tools["plan"].description
            assert tools["plan"].input_schema["required"] == ["words"]
            found = await client.call_tool("plan", {"words": [*TEXT]})
            assert not found.is_error
            assert found.content[0].text.startswith("llama-3.1-8b on RTX 4070")
            assert found.structured_content["schema"] == "foretrain.plan/1"
            wrong = await client.call_tool("plan", {"words": ["gpt2-124m", "--gpu", "4071"]})
            assert wrong.is_error
            assert wrong.content[0].text.startswith("No card named '4071'")

    anyio.run(ask)
