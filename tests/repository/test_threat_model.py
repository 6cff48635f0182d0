"""docs/threat-model.md tells the truth: where code is run at all, and that what lies about is never imported."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.command import REPO
from tests.kit.tiny import TINY, write_dataset

PACKAGE = REPO / "foretrain"
PAGE = REPO / "docs" / "threat-model.md"

# Every place that can run what it is given, with why that is no file's of somebody else. The page has this table.
RUNS_CODE = {
    ("predict/abstract/programs.py", "exec"): "our own model code, without torch",
    ("predict/abstract/programs.py", "builtins.__import__"): "what that code imports",
    ("model/techniques/__init__.py", "__import__"): "our own files",
    ("runs/formats/__init__.py", "__import__"): "our own files",
    ("predict/trace/compiled.py", "eval"): "a text that Inductor made in this process",
    ("predict/trace/elsewhere.py", "runpy.run_path"): "the script that `foretrain.trace` was asked to trace",
    ("predict/trace/forked.py", "pickle.loads"): "what our own forked child sends",
    ("base/files.py", "pickle.Unpickler"): "the restricted reader, which knows no names",
}
RISKY = re.compile(
    r"eval|exec|compile|__import__|builtins\.__import__|os\.(system|popen|exec\w*|spawn\w*)|runpy\.\w+|marshal\.loads?|"
    r"pickle\.(loads?|Unpickler)|(torch|np|numpy|dill|shelve|joblib|cloudpickle)\.(load|loads|open)|\w*exec_module"
)
RISKY_WORDS = ("shell", "trust_remote_code", "allow_pickle", "weights_only")  # a keyword that decides whether code runs


def risky(tree: ast.Module) -> set[str]:
    """What a module calls, or derives from, that can run what it is given."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name} if RISKY.fullmatch(name) else set()
            found |= {f"{word}=" for word in RISKY_WORDS if word in {each.arg for each in node.keywords}}
        elif isinstance(node, ast.ClassDef):
            found |= {name for base in node.bases if RISKY.fullmatch(name := ast.unparse(base))}
    return found


def test_code_is_run_in_these_places_alone() -> None:
    places = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in risky(ast.parse(path.read_text("utf-8")))
    }
    assert places == set(RUNS_CODE)


def test_a_place_that_runs_code_is_found() -> None:
    code = "torch.load(x, weights_only=False)\nsubprocess.run(x, shell=True)\nclass A(pickle.Unpickler): ...\neval(x)"
    assert risky(ast.parse(code)) == {"torch.load", "weights_only=", "shell=", "pickle.Unpickler", "eval"}


def test_the_page_names_each_place() -> None:
    text = PAGE.read_text("utf-8")
    for (file, _), why in RUNS_CODE.items():
        assert f"foretrain/{file}" in text, file
        assert why in text, why


def test_the_page_names_tests_that_exist() -> None:
    for file, name in re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/.]+)\)", PAGE.read_text("utf-8")):
        assert f"def {file}(" in (REPO / name).read_text("utf-8"), file


HIJACK = """
import pathlib
pathlib.Path({canary!r}).touch()
raise ImportError("taken from the working directory")
"""
NAMES = (
    "json", "random", "numpy", "torch", "click", "rich", "pydantic", "psutil", "yaml", "safetensors", "foretrain",
    "sitecustomize", "usercustomize", "importlib_metadata", "triton", "transformers", "tokenizers",
)  # fmt: skip
START = [sys.executable, "-P", "-c", "from foretrain.cli import main; main()"]  # as the script `foretrain` begins
TINY_RUN = [f"--{name}={value}" for name, value in {**TINY, "max_iters": 4, "lr_decay_iters": 4}.items()]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "gpt2-124m", "--gpu", "4070"),
        ("train", *TINY_RUN, "--auto-restart"),
        pytest.param(("train", *TINY_RUN, "--gpus", "2"), marks=pytest.mark.slow),
        ("plan", "baby", "--gpu", "4070", "--python", sys.executable, "--show-config"),
        ("explain", str(REPO / "examples/snapshots/fragmented.pickle")),
    ],
    ids=["plan", "auto-restart", "ranks", "python", "snapshot"],
)
def test_what_lies_in_the_working_directory_is_not_imported(words: tuple[str, ...], own_directory: Path) -> None:
    """Somebody else's repository may hold a json.py; neither a command nor a process that it starts imports that."""
    canary = own_directory / "canary"
    write_dataset(own_directory / "data" / "toy")
    for name in NAMES:
        Path(f"{name}.py").write_text(HIJACK.format(canary=str(canary)))
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([*START, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not canary.exists()
