"""A bug of foretrain's own is one sentence and a file, in every command, on the page and in every child process."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from foretrain import cli
from foretrain.base import bugs
from foretrain.base.processes import starts
from foretrain.cli.command import Group
from foretrain.web import calls, child, routes
from foretrain.web.guard import TOKEN_HEADER
from tests.kit.command import REPO, foretrain


def broken(*args: object, **more: object) -> NoReturn:
    raise KeyError("run")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(bugs.DEBUG, raising=False)


def leaves(group: Group, before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    """(words, command) of every command that does something."""
    found: list[tuple[tuple[str, ...], object]] = []
    for name, command in group.members().items():
        words = (*before, name)
        found += leaves(command, words) if isinstance(command, Group) else [(words, command)]
    return found


def kept(sentence: str) -> str:
    found = re.search(r"\S+[/\\]bug-[\w-]+\.txt", sentence)
    assert found, sentence
    return Path(found[0]).read_text("utf-8")


def test_a_failure_in_any_command_is_one_sentence_and_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    group = cli.app
    monkeypatch.setattr(cli, "app", group)
    found = leaves(group)
    assert len(found) >= 20
    for words, command in found:
        monkeypatch.setattr(command, "invoke", broken)
        monkeypatch.setattr(command, "params", [])  # what it takes is not what is asked here
        ended = foretrain(*words)
        assert ended.returncode == 1, words
        assert "Traceback" not in ended.stdout + ended.stderr
        assert re.fullmatch(r"error: This is a bug in foretrain: KeyError at .+ Please report it .+\n", ended.stderr)
        assert "Traceback (most recent call last)" in kept(ended.stderr)


def test_bug_sentence_names_the_line_and_file_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.predict.plan.available", broken)
    ended = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--out_dir=x", "--wandb_run_name=me", code=1)
    assert "KeyError at foretrain/predict/plan.py:" in ended.stderr
    text = kept(ended.stderr)
    assert "plan gpt2-124m --gpu 4070" in text
    assert "KeyError: 'run'" in text
    as_json = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--json")
    told = json.loads(as_json.stdout)
    assert (told["id"], told["exit_code"], as_json.returncode) == ("internal.bug", 1, 1)


def test_the_traceback_is_shown_to_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.predict.plan.available", broken)
    monkeypatch.setenv(bugs.DEBUG, "1")
    ended = foretrain("plan", "gpt2-124m", "--gpu", "4070")
    assert "KeyError: 'run'" in ended.stderr
    assert "Traceback" in ended.stderr


def test_where_no_file_can_be_written_the_sentence_is_still_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(bugs.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert "No file could be written" in str(bugs.unexpected_error(KeyError("run")))


@pytest.mark.parametrize("words", [("plan",), ("explain",), ("compare",), ("report",), ("export",), ("advise",)])
@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000])
def test_a_name_that_no_file_can_have_is_not_called_a_bug(words: tuple[str, ...], name: str) -> None:
    ended = foretrain(*words, name, code=2)
    assert ended.stderr.startswith("error: ")
    assert "bug" not in ended.stderr


def test_no_memory_left_is_not_called_a_bug() -> None:
    found = bugs.unexpected_error(MemoryError())
    assert (found.id, int(found.exit_code)) == ("memory.computer", 5)


def test_a_torch_that_does_not_start_is_not_called_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPO)]))
    ended = foretrain("export", "run", apart=True, code=4)
    assert ended.stderr.startswith("error: torch ")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not starts("torch")
    assert starts("json")


def test_a_thread_that_fails_says_one_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    bugs.watch_threads()
    thread = threading.Thread(target=broken)
    thread.start()
    thread.join()
    said = capfd.readouterr().err
    assert "This is a bug in foretrain: KeyError" in said
    assert "Traceback" not in said


def test_a_bug_behind_the_page_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calls.POSTED, "/api/plan", broken)
    client = TestClient(routes.create_app(80, "secret", []), base_url="http://127.0.0.1:80")
    headers = {TOKEN_HEADER: "secret", "content-type": "application/json", "origin": "http://127.0.0.1"}
    answer = client.post("/api/plan", content=b"{}", headers=headers)
    assert answer.status_code == 500
    assert answer.json()["id"] == "internal.bug"
    assert "KeyError" in kept(answer.json()["message"])


def test_the_page_s_children_answer_with_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.app.exact.traced", broken)
    monkeypatch.setattr(routes, "made", broken)
    monkeypatch.setattr(calls, "advise", broken)
    asked = {"exact": {"model": "baby"}, "comparison": [], "advice": {}}
    assert asked.keys() == child.WORK.keys()
    for work, each in asked.items():
        assert "This is a bug in foretrain" in child.done(work, {"language": "en", "asked": each}, print)["error"]


def test_a_child_of_prepare_says_its_sentence_on_stderr() -> None:
    code = (
        "from foretrain.base import processes\n"
        "import foretrain.data.prepare.encode as encode\n"
        "def broken(*words): raise KeyError('run')\n"
        "encode.answer = encode.encoder_of = encode.tokenizers.load = broken\n"
        "class Parent:\n"
        "    def receive(self): return processes.Frame({'folder': '.', 'name': 'byte'})\n"
        "encode.main(Parent())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(r"This is a bug in foretrain: KeyError at .+\n", ended.stderr)
