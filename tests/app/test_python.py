"""foretrain from Python: what a notebook shows, plans by name, completion in a shell."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foretrain as library
from foretrain.base.errors import ConfigError, UserError
from foretrain.cli.completion import cards, config_options
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import plan as predict_plan
from foretrain.runs.folder import Note
from tests.kit.calibrations import hasty  # noqa: F401
from tests.kit.command import REPO, foretrain, refused
from tests.kit.tiny import TINY, write_dataset


def test_tab_completion_shows_the_public_names() -> None:
    assert {"plan", "trace", "compare", "find_gpu", "resolve", "UserError"} <= set(dir(library))
    assert not {"Any", "import_module"} & set(dir(library))
    assert all(getattr(library, name) is not None for name in dir(library))


PYTHON = re.findall(r"```python\n(.*?)```", (REPO / "docs/python.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_the_examples_of_the_docs_run(number: int, own_directory: Path) -> None:
    (own_directory / "example.py").write_text(PYTHON[number])
    code = "if __name__ == '__main__':\n    import runpy\n    runpy.run_path('example.py', run_name='example')\n"
    (own_directory / "main.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_function_says_what_comes_back_with_types() -> None:
    functions = [(name, one) for name in dir(library) if inspect.isfunction(one := getattr(library, name))]
    assert len(functions) >= 10
    for name, function in functions:
        text, signature = inspect.getdoc(function) or "", inspect.signature(function)
        assert text, name
        unsaid = [one.name for one in signature.parameters.values() if one.annotation is one.empty]
        assert not unsaid, (name, unsaid)
        assert signature.return_annotation is not signature.empty, name
        if name not in ("check_forecast", "find_gpu"):
            assert "Raises" in text, name


def test_training_from_python_is_the_command() -> None:
    heard: list[Any] = []
    options = {**TINY, "max_iters": 4, "lr_decay_iters": 4}
    write_dataset(Path("data/toy"))
    record = library.train(options, listen=heard.append, out_dir="by-python")
    assert (record.status, record.steps_done) == ("finished", 4)
    assert [event.step for event in heard if getattr(event, "kind", "") == "step"] == [0, 1, 2, 3]
    ids = [event.id for event in heard if isinstance(event, Note)]
    assert (ids[0], ids[-1]) == ("train.start", "train.finished")
    done = foretrain("train", *(f"--{key}={value}" for key, value in options.items()), "--out_dir=typed", "--json")
    told = json.loads(done.stdout)
    assert told["val_loss"] == record.val_loss
    check = library.compare("by-python")
    assert isinstance(check, library.ForecastCheck)
    assert isinstance(library.compare("by-python", "typed"), library.Comparison)
    assert isinstance(library.explain("by-python"), library.RunExplanation)
    assert library.report("by-python").read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(UserError) as caught:
        library.train(options, dataset="nowhere")
    assert caught.value.id.startswith("data.")


def test_a_plan_by_names_is_the_plan_of_the_command_line() -> None:
    made = library.plan("gpt2-124m", gpu="RTX 4070", batch_size=8, compile=False, used_by_others="2GB")
    words = (
        "plan",
        "gpt2-124m",
        "--gpu",
        "RTX 4070",
        "--batch_size=8",
        "--compile=false",
        "--used-by-others",
        "2GB",
        "--json",
    )
    shown = json.loads(foretrain(*words).stdout)
    assert made.to_json() == {key: value for key, value in shown.items() if key not in ("schema", "advice")}


def test_a_plan_takes_every_form_of_a_config() -> None:
    resolved = resolve(["gpt2-124m"])
    by_engine = predict_plan(resolved.config, find("4090"))
    for config in ("gpt2-124m", resolved, resolved.config, resolved.config.model_dump()):
        made = library.plan(config, gpu=find("4090"))
        assert made.memory == by_engine.memory
        assert made.config == by_engine.config
    smaller = library.plan(resolved.config, gpu="4090", batch_size=2)
    assert smaller.config.batch_size == 2
    assert smaller.config.n_embd == 768
    assert library.plan(str(REPO / "examples/real-cases/a.py"), gpu="4070").name == "a"


def test_what_cannot_be_planned_is_one_error() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        library.plan("gpt2-124m", gpu="4070", batchsize=2)
    with refused("usage.one_card"):
        library.plan("gpt2-124m", gpu="4070,4090")
    with refused("gpu.others_beyond"):
        library.plan("gpt2-124m", gpu="4070", used_by_others="900GB")


def test_a_plan_prints_as_a_screen_and_not_as_its_fields() -> None:
    made = library.plan("gpt2-124m", gpu="RTX 4070")
    assert repr(made).startswith("<plan of gpt2-124m on RTX 4070: fits, 6.05 GiB of 11.56 GiB, ")
    lines = str(made).splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)
    assert "6.05 GiB" in str(made)
    html = made._repr_html_()
    assert html.startswith("<pre")
    assert "6.05 GiB" in html


def test_explained_snapshot_is_printed_as_on_the_command_line() -> None:
    path = REPO / "examples/snapshots/fragmented.pickle"
    shown = foretrain("explain", str(path), code=0).stdout
    assert "".join(str(library.explain(path)).split())[:300] == "".join(shown.split())[:300]


def test_hostile_names_stay_text_in_a_notebook() -> None:
    html = library.plan("gpt2-124m", gpu="4070", name="<script>alert(1)</script>\x1b[31m")._repr_html_()
    assert html
    assert "<script>" not in html
    assert "\x1b" not in html


def test_importing_and_listing_costs_no_torch() -> None:
    code = "import sys, foretrain; dir(foretrain); assert not {'torch', 'pydantic', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("40", "4070"), ("rtx-40", "RTX-4070-Ti-SUPER"), ("3060,h2", "3060,H200-SXM-141GB"), ("c", "cpu")],
)
def test_cards_are_completed_in_a_form_that_is_found(typed: str, offered: str) -> None:
    assert offered in cards(typed)
    for word in cards(typed):
        assert " " not in word
        last = word.rpartition(",")[2]
        assert last in ("cpu", "auto") or find(last)


def test_config_options_are_completed_in_both_spellings() -> None:
    assert config_options("--n_l") == config_options("--n-l") == ["--n_layer="]
    assert len(config_options("--")) > 60
    assert config_options("--lora_r", "plan") == ["--lora_r="]
    assert config_options("--kv", "plan") == ["--kv="]
    assert config_options("--lora", "train") == config_options("--kv", "train") == []
    assert config_options("--kv", "advise") == ["--kv="]
    assert config_options("--nope") == []


@pytest.mark.parametrize(
    ("line", "offered"), [("foretrain plan gpt2-124m --gpu 407", "4070"), ("foretrain train --n_l", "--n_layer=")]
)
def test_the_shell_is_answered(line: str, offered: str) -> None:
    asked = {"_FORETRAIN_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    code = "from foretrain.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['foretrain']; " + code],
        env={**os.environ, **asked}, capture_output=True, text=True, cwd=REPO,
    )  # fmt: skip
    assert f"plain,{offered}" in run.stdout.split("\n")


def test_completing_the_name_of_a_command_imports_no_command() -> None:
    asked = {"_FORETRAIN_COMPLETE": "zsh_complete", "COMP_WORDS": "foretrain pr", "COMP_CWORD": "1"}
    code = (
        "import atexit, sys; sys.argv = ['foretrain']; from foretrain.cli import main; "
        "atexit.register(lambda: print(*(m for m in sys.modules if m.startswith('foretrain.cli.commands.')), file=sys.stderr)); "
        "main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, cwd=REPO
    )
    assert "prepare" in run.stdout
    assert "token shards" in run.stdout
    assert not run.stderr.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_what_is_installed_for_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "foretrain"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m foretrain "$@"\n')
    program.chmod(0o755)
    words = "COMP_WORDS=(foretrain plan --used-) COMP_CWORD=2"
    script = f"{program} --install-completion; {program} --install-completion; . ~/.bashrc; {words}; _foretrain_completion {program}"
    run = subprocess.run(
        ["bash", "-c", f"{script}; echo ${{COMPREPLY[@]}}"], env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True, text=True, cwd=REPO,
    )  # fmt: skip
    assert run.stdout.split() == ["--used-by-others"]
    assert (tmp_path / ".bashrc").read_text().count("source") == 1


def test_from_text_to_files_for_others() -> None:
    """The commands prepare, train, sample and export as functions."""
    Path("book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200, "utf-8")
    done = library.prepare("book.txt", "data/book", tokenizer="byte", workers=1)
    tokens = {split: found.tokens for split, found in done.index.splits.items()}
    assert tokens["val"] == pytest.approx(0.1 * sum(tokens.values()), rel=0.05)  # one text is cut, a tenth of it
    options = {**TINY, "vocab_size": 256, "dataset": "data/book", "max_iters": 5, "eval_interval": 5}
    run = library.train(options, out_dir="out")
    assert run.status == "finished"
    made = library.sample("out", "the ", 20, seed=1)
    assert isinstance(made, library.Sample)
    assert made.text == library.sample("out", "the ", 20, seed=1).text
    assert (made.checkpoint, made.skipped) == ("step-0000000005", ())
    exported = library.export("out", "safetensors", "exported")
    assert (exported.step, exported.files) == (5, tuple(sorted(path.name for path in Path("exported").iterdir())))


def test_a_function_refuses_what_its_command_refuses() -> None:
    with pytest.raises(library.UserError) as caught:
        library.prepare("book.txt", "data/book", shards=3)
    assert (caught.value.id, caught.value.values["value"]) == ("usage.bad_value", "shards")
    with pytest.raises(library.UserError) as caught:
        library.prepare("book.txt", "data/book", val_share=2)
    assert (caught.value.id, caught.value.values["option"]) == ("usage.bad_value", "val_share")
    with pytest.raises(library.UserError) as caught:
        library.tune("baby", change=["n_layer"])
    assert (caught.value.id, caught.value.values["option"]) == ("usage.tune_knobs", "change")
    with pytest.raises(library.UserError) as caught:
        library.sample("nowhere")
    assert caught.value.id == "data.no_run"


def test_a_calibration_is_kept_for_plans(hasty: Path) -> None:
    heard: list[float] = []
    found = library.calibrate("cpu", quick=True, listen=lambda what, share: heard.append(share))
    assert heard == sorted(heard)
    assert library.plan("baby", gpu="cpu").gpu.calibration == found


def test_names_are_listed_when_somebody_asks() -> None:
    """Importing foretrain read and parsed a file each time."""
    code = (
        "import pathlib\nread, real = [], pathlib.Path.read_text\n"
        "pathlib.Path.read_text = lambda path, *how, **more: (read.append(path.suffix), real(path, *how, **more))[1]\n"
        "import foretrain\nassert '.pyi' not in read\n"
        "assert 'plan' in foretrain.__all__ and 'plan' in dir(foretrain) and not hasattr(foretrain, 'nothing')\n"
        "from foretrain import *\nassert tune and sample and read.count('.pyi') == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)
