"""benchmarks/results: figures that cost seconds are made again, and each file says by which commit it was made."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command import REPO

RESULTS = REPO / "benchmarks" / "results"
ABOUT = ("date", "commit", "machine", "versions")  # of the run, not of its figures


def near(made: Any, kept: Any, where: str = "") -> None:
    """Hold two results to each other: numbers to nine digits, as mathematical functions differ by machine."""
    if isinstance(kept, dict):
        assert made.keys() == kept.keys(), where
        for key in kept:
            near(made[key], kept[key], f"{where}.{key}")
    elif isinstance(kept, list):
        assert len(made) == len(kept), where
        for place, pair in enumerate(zip(made, kept, strict=True)):
            near(*pair, f"{where}[{place}]")
    elif isinstance(kept, float):
        assert made == pytest.approx(kept, rel=1e-9), where
    else:
        assert made == kept, where


def held(made: Path, name: str, *, every: int = 1) -> None:
    """Hold what a benchmark wrote to its kept file; of its first, `every` and so on rows, those rows alone."""
    found, kept = (json.loads(path.read_text("utf-8")) for path in (made, RESULTS / f"{name}.json"))
    assert kept["commit"]
    assert found["commit"]
    if every > 1:
        near(found["rows"], kept["rows"][::every])
    else:
        near(*({key: value for key, value in each.items() if key not in ABOUT} for each in (found, kept)))


@pytest.mark.parametrize("name", [
    "time_against_logs", "inference_published", "collectives_measured",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("finetune_measured", "cluster_measured")),
])  # fmt: skip
def test_figures_are_those_of_the_present_code(name: str, tmp_path: Path) -> None:
    """Where this fails the docs quote figures that the code no longer gives: run benchmarks/NAME.py and `make docs`."""
    made = tmp_path / "made.json"
    words = [sys.executable, f"benchmarks/{name}.py", "--out", str(made)]
    subprocess.run(words, cwd=REPO, check=True, capture_output=True)
    held(made, name)


@pytest.mark.parametrize("name", ["finetune_measured", "cluster_measured"])
def test_each_eighth_row_is_that_of_the_present_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within this process, of the two that plan hundreds of runs."""
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    benchmark = importlib.import_module(name)
    if name == "finetune_measured":
        monkeypatch.setitem(benchmark.PUBLISHED, "rows", benchmark.PUBLISHED["rows"][::8])
    else:
        cases = benchmark.cases()[::8]
        monkeypatch.setattr(benchmark, "cases", lambda: cases)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "made.json")])
    benchmark.main()
    held(tmp_path / "made.json", name, every=8)


def test_model_types_are_those_of_the_present_code(tmp_path: Path) -> None:
    """A sample of the survey; where this fails, run `python benchmarks/model_types.py` into an empty file."""
    transformers, made = pytest.importorskip("transformers"), tmp_path / "made.json"
    pytest.importorskip("peft")
    kept = json.loads((RESULTS / "model_types.json").read_text("utf-8"))
    if transformers.__version__ != kept["packages"]["transformers"]:
        pytest.skip("the file is of another transformers")
    words = ["benchmarks/model_types.py", "--only", "bert,qwen2", "--parts", "trace,comparison", "--out", str(made)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([sys.executable, *words], cwd=REPO, env=environment, check=True, capture_output=True)
    rows = {row["model_type"]: row for row in kept["rows"]}
    found = json.loads(made.read_text("utf-8"))["rows"]
    assert len(found) == 2
    for row in found:
        of_code = ("method", "trained", "n_params", "traced_bytes")
        assert {name: row[name] for name in of_code} == {name: rows[row["model_type"]][name] for name in of_code}
        assert abs(row["error"]) <= 0.001
