"""`--help` in each language."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

from foretrain.base import messages
from foretrain.cli import app, completion, help
from foretrain.cli.command import Group
from foretrain.cli.commands import SUMMARIES
from tests.kit.command import foretrain

ROOT: Any = app
TEXTS = help.texts(ROOT)
OWN = [id for id in messages.languages() if id != "en"]


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    """The list is written out so that `foretrain --help` imports no command."""
    assert {name: command.help for name, command in ROOT.members().items()} == SUMMARIES


def test_a_command_imports_no_other_one() -> None:
    code = (
        "import sys\nfrom foretrain.cli import app\n"
        "for words in (['--help'], ['gpus', '--help'], ['gpu']):\n"
        "    try:\n        app(words)\n    except BaseException:\n        pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('foretrain.cli.commands.')))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert made.splitlines()[-1] == "['foretrain.cli.commands.gpus']"


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in command.members().items() if isinstance(command, Group) else ():
        yield from commands(each, (*path, name))


def words_of(text: str) -> str:
    """A text without frames, marks of direction and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", re.sub("[\u2066-\u2069]", "", text)).split())


@pytest.mark.parametrize("id", OWN)
def test_every_option_of_every_command_has_a_text(id: str) -> None:
    own = messages.texts_of(id)
    assert [key for key in TEXTS if key not in own] == []
    assert [key for key in own if key.startswith("cli_help.") and key not in TEXTS] == []
    for key, english in TEXTS.items():
        assert own[key].count("{}") == english.count("{}"), key


@pytest.mark.parametrize("id", OWN)
def test_help_says_nothing_in_english(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "5000")
    sentences = [words_of(text) for text in TEXTS.values() if len(text.split()) > 2]
    headings = r"(Usage|Examples):|(Arguments|Options|Commands) ─|\[(default|required)"
    for path, _ in commands():
        shown = foretrain("--lang", id, *path, "--help")
        assert shown.returncode == 0, path
        said = words_of(shown.stdout)
        assert [text for text in sentences if text in said] == [], path
        assert not re.search(headings, shown.stdout), path
        first = TEXTS[f"cli_help.{'_'.join(path) or 'foretrain'}.summary"]
        key = next(key for key, text in TEXTS.items() if text == first)
        assert words_of(messages.texts_of(id)[key]) in said


def test_help_in_english_is_what_the_code_says() -> None:
    said = words_of(foretrain("train", "--help").stdout)
    assert said.startswith("Usage:")
    assert "foretrain train [OPTIONS]" in said
    assert "Resume from the last checkpoint automatically after a crash." in said


@pytest.mark.parametrize("name", ["plan", "advise", "train"])
def test_help_shows_what_is_used_and_help_all_the_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = (foretrain(name, word).stdout for word in ("--help", "--help-all"))
    assert short.count("\n") <= 70
    listed, all_listed = (re.findall(r"^│ (--[\w-]+)", text, re.MULTILINE) for text in (short, whole))
    declared = [each.opts[0] for each in ROOT.members()[name].get_params(click.Context(ROOT)) if each.opts[0][0] == "-"]
    assert set(listed) < set(all_listed)
    assert set(declared) <= set(all_listed)
    assert f"All {len(all_listed)} options: foretrain {name} --help-all" in short
    for options in completion.options_of(name).values():
        assert {option.replace("_", "-") for option in options} <= {each[2:].replace("_", "-") for each in all_listed}
    assert ("--lora-r" in listed) == (name != "train")
    examples = ROOT.members()[name].epilog.split("\n\n")
    assert words_of(examples[0]) in words_of(short)
    assert words_of("\n".join(examples)) in words_of(whole)


def test_a_command_alone_lists_commands_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = foretrain().stdout
    groups = re.split(r"^╭─ (.+?) ─+╮$", shown, flags=re.MULTILINE)
    titles = dict(zip(groups[1::2], groups[2::2], strict=True))
    assert next(iter(titles)) == "Plan"
    assert "│ train " in titles["Train and fine-tune"]
    assert sorted(re.findall(r"^│ (\w+) ", shown, re.MULTILINE)) == sorted(SUMMARIES)


def test_an_error_names_the_option_that_was_typed() -> None:
    error = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--used-by-others=much", code=2)
    assert "--used-by-others = 'much'" in error.stderr
