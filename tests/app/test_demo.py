"""The demo as a newcomer runs it, shortened; and the GPU suite's script, on a CPU."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.exceptions import Exit

from foretrain.app.calibrate import calibrate
from foretrain.cli.commands import demo
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace.service import Request, traces
from tests.kit.calibrations import hasty  # noqa: F401
from tests.kit.command import REPO, foretrain


@pytest.fixture(autouse=True)
def uncalibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo calibrates this machine, which the other tests must not find."""
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))


def test_demo_in_short(hasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_here(dtypes: list[str], *, quiet: bool) -> int:
        calibrate("cpu", quick=True, dtypes=dtypes)
        return 0

    monkeypatch.setattr("foretrain.app.demo.measure", measure_here)
    result = foretrain("demo", "--steps", "40", timeout=400, code=0)
    for words in ("1. The forecast", "2. The run", "3. What the model writes", "4. Forecast against measurement"):
        assert words in result.stderr
    assert "Validation loss" in result.stdout
    forecast, more, _ = result.stdout.partition("`foretrain plan baby --device=cpu --full`")
    assert more
    assert 0 < len(forecast.splitlines()) <= 12
    assert Path("out-demo/report.html").is_file()
    record = json.loads(Path("out-demo/run.json").read_text())
    assert record["val_loss"] < 3.0  # byte frequencies alone give 3.09; the demo makes 1,500 steps


def test_a_busy_machine_is_said_and_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures would be of the other programs, and would be kept."""
    measured: list[list[str]] = []

    def run(command: list[str], **how: Any) -> Any:
        measured.append(command[command.index("foretrain") + 1 :])
        return subprocess.CompletedProcess(command, 5 if len(measured) > 1 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    resolved = resolve(["baby", "--device=cpu", "--dtype=bfloat16"])
    demo.calibrate_once(resolved, busy=[("machine_busy", {"others": 0.6, "own": 0.4})], quiet=False)
    assert measured == []
    assert "other programs use 60.0% of the processor" in " ".join(capsys.readouterr().err.split())
    demo.calibrate_once(resolved, busy=[], quiet=False)
    assert measured == [["calibrate", "--device=cpu", "--quick", "--dtype=float32", "--dtype=bfloat16"]]
    with pytest.raises(Exit) as end:  # as a calibration that fails ends
        demo.calibrate_once(resolved, busy=[], quiet=True)
    assert end.value.exit_code == 5
    assert measured[1][-1] == "--quiet"


@pytest.mark.slow
def test_demo_whole() -> None:
    """What `make demo` shows: the loss clearly falls, far below what byte frequencies give."""
    result = foretrain("demo", "--json", timeout=900)
    found = json.loads(result.stdout)
    run = found["run"]
    assert run["first_val_loss"] > 5
    assert run["val_loss"] < 0.55 * found["unigram_entropy"]
    memory = {row["id"]: row["predicted"] / row["measured"] - 1 for row in found["comparison"]["memory"]}
    assert all(abs(error) < 0.005 for id, error in memory.items() if not id.startswith("process"))


@pytest.mark.slow
def test_gpu_speed_runs_on_a_cpu() -> None:
    """The script that will run on a lent card for minutes must not fail at its first line."""
    words = [sys.executable, str(REPO / "benchmarks/gpu/speed.py"), "--device", "cpu", "--small", "--out", "speed.json"]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    row = json.loads(Path("speed.json").read_text("utf-8"))["rows"][0]
    assert row["measured"]["step_s"] > 0
    assert row["calibrated"]["expected_s"] > 0


@pytest.mark.slow
def test_gpu_suite_runs_on_a_cpu() -> None:
    script = REPO / "benchmarks" / "gpu" / "suite.py"
    command = [sys.executable, str(script), "--device", "cpu", "--small", "--out", "g.json.gz"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads(gzip.decompress(Path("g.json.gz").read_bytes()))["rows"]
    assert [row["step"] for row in rows] == ["foretrain", "nanogpt"]
    assert all("error" not in row["memory"] for row in rows)


@pytest.mark.slow
def test_the_contest_with_nanogpt_runs() -> None:
    """Contestants in turn have the same curves to the rounding of bfloat16."""
    script = REPO / "benchmarks" / "against_nanogpt.py"
    words = [sys.executable, str(script), "--only", "tiny", "--eager", "--out", "c.json", "--threads=1"]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    rows = json.loads(Path("c.json").read_text("utf-8"))["models"][0]["contestants"]
    assert {row["name"] for row in rows} == {"nanoGPT", "nanoGPT with autocast", "foretrain"}
    for row in rows:
        assert row["ratio"] > 0
        assert min(row["losses"]) < row["losses"][0]  # how many steps there are depends on the machine
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=0.01)
        assert row["loss_difference"]["largest"] < 2**-8


def test_gpu_comparison_of_a_card_that_is_the_simulator() -> None:
    """A made-up measurement, written from a trace's own replay: every error must be 0, and a lost allocation shown."""
    knobs = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 512, "batch_size": 4}
    gpu = find("RTX 4070")
    (trace,) = traces(
        [Request(StepSpec.of(RunConfig.model_validate(knobs), gpu, "nanogpt", dtype="float16", compiled=False))]
    )
    run = replay(trace)
    sizes = [trace.allocations[e].nbytes if e >= 0 else -trace.allocations[~e].nbytes for e in trace.events]
    phases = {
        p.phase: {"allocated_bytes": p.allocated_bytes, "reserved_bytes": p.reserved_bytes}
        for p in run.phases
        if p.phase != "save"
    }
    memory = {
        "phases": phases, "process_bytes": run.peak_reserved_bytes + (300 << 20),
        "reserved_at_end_bytes": run.peak_reserved_bytes,
        "history": {"sizes": [*sizes, 5 << 20], "places": {str(5 << 20): "somewhere.py:7"}},
    }  # fmt: skip
    row = {
        "name": "x",
        "knobs": knobs,
        "dtype": "float16",
        "step": "nanogpt",
        "compiled": False,
        "memory": memory,
        "time": None,
    }
    machine = {"gpu": "NVIDIA GeForce RTX 4070", "memory_bytes": gpu.memory_bytes, "sm_count": gpu.sm_count}
    measured = {"machine": machine, "versions": {"torch": "2.13.0"}, "rows": [row]}
    Path("m.json.gz").write_bytes(gzip.compress(json.dumps(measured).encode()))
    script = REPO / "benchmarks" / "gpu" / "compare.py"
    result = subprocess.run(
        [sys.executable, str(script), "m.json.gz", "--out", "c.json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(Path("c.json").read_text())
    summary, (compared,) = found["summary"], found["rows"]
    assert summary["allocated_eager_worst"] == 0
    assert summary["reserved_median"] == 0
    assert (summary["under_estimates"], summary["false_refusals"]) == (0, 0)
    assert compared["differences"] == [{"size_bytes": 5 << 20, "only_on_card": 1, "place": "somewhere.py:7"}]
