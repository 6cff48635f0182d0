"""The notebooks of examples/ run from top to bottom, and what their cells show says something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.command import REPO

NOTEBOOKS = sorted((REPO / "examples" / "notebooks").glob("*.ipynb"))
QUICK = {"will-it-fit"}  # others import torch, or train
# What a notebook does with a cell: runs it, and shows what its last line is worth.
PROGRAM = """
import ast, json, sys

names = {"__name__": "__main__"}
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    *lines, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr)
    exec(compile(ast.Module(lines if shows else [*lines, last], []), "cell", "exec"), names)
    if shows:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        html = getattr(value, "_repr_html_", lambda: None)()
        print("HTML" if html else "TEXT", html or repr(value))
"""


def test_there_are_notebooks_and_no_output_is_kept_in_them() -> None:
    assert len(NOTEBOOKS) >= 4
    for path in NOTEBOOKS:
        found = json.loads(path.read_text("utf-8"))
        assert found["nbformat"] == 4
        assert not any(cell.get("outputs") for cell in found["cells"]), path.name


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.slow) for p in NOTEBOOKS]
)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    if path.stem == "model-in-hand":
        pytest.importorskip("transformers", minversion="5")
        pytest.importorskip("peft")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.json").write_text(json.dumps(sources), "utf-8")
    (tmp_path / "notebook.py").write_text(f"if __name__ == '__main__':\n    exec({PROGRAM!r})\n", "utf-8")
    ended = subprocess.run(
        [sys.executable, "notebook.py", "cells.json"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "GiB" in ended.stdout or "MiB" in ended.stdout or "loss" in ended.stdout, ended.stdout
    if path.stem != "trace-your-code":
        assert "<pre" in ended.stdout
    if path.stem in ("will-it-fit", "model-in-hand"):
        assert "<svg" in ended.stdout
