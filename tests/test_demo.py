"""The demo as a newcomer runs it, shortened; and the GPU suite's script, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPO, foretrain


def test_demo_in_short(own_directory: Path) -> None:
    result = foretrain("demo", "--steps", "150")
    assert result.returncode == 0, result.stderr
    for words in ("1. The forecast", "2. The run", "3. What the model writes", "4. Forecast and measurement"):
        assert words in result.stderr
    assert "Validation loss" in result.stdout
    assert Path("out-demo/report.html").is_file()
    record = json.loads(Path("out-demo/run.json").read_text())
    assert record["val_loss"] < 2.8  # byte frequencies alone give 3.09; 150 steps are a tenth of the demo


@pytest.mark.slow
def test_demo_whole(own_directory: Path) -> None:
    """What `make demo` shows: the loss clearly falls, far below what byte frequencies give."""
    result = foretrain("demo", "--json", timeout=900)
    found = json.loads(result.stdout)
    run = found["run"]
    assert run["first_val_loss"] > 5
    assert run["val_loss"] < 0.55 * found["unigram_entropy"]
    memory = {row["id"]: row["predicted"] / row["measured"] - 1 for row in found["comparison"]["memory"]}
    assert all(abs(error) < 0.005 for id, error in memory.items() if not id.startswith("process"))


@pytest.mark.slow
def test_gpu_suite_runs_on_a_cpu(own_directory: Path) -> None:
    script = REPO / "benchmarks" / "gpu" / "suite.py"
    command = [sys.executable, str(script), "--device", "cpu", "--small", "--out", "g.json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads(Path("g.json").read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert "error" not in row
        if row["step"] == "foretrain":
            assert abs(row["errors"]["steady_step"]) < 0.02
