"""One run whose speed changed when it was resumed: every command gives the same time of a step, and says so."""

import json
from pathlib import Path

import pytest

from foretrain.analysis.measured_step import measured
from foretrain.base.messages import format_value
from foretrain.runs.folder import RunDirectory
from foretrain.web import runs
from foretrain.web import runs as page
from tests.kit.command import foretrain
from tests.kit.runs import write_measured_run


def resumed(path: Path) -> Path:
    """46 steps of 1.75 s, then 54 of 0.8 s; its own record knows the second part only, as the trainer writes it."""
    write_measured_run(path, steps=100)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["step_s"] = (1.75 if line["step"] < 46 else 0.8) * (1 + 0.0001 * (line["step"] % 7))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((path / "run.json").read_text())
    record |= {"resumed_from": [46], "step_s": 0.9, "tokens_per_s": 128 / 0.9, "mfu": 0.1}
    (path / "run.json").write_text(json.dumps(record))
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return resumed(tmp_path / "mine")


def answer(*words: str) -> dict:
    ended = foretrain(*words, "--json", code=0)
    return json.loads(ended.stdout)


def test_every_command_gives_the_same_time_of_a_step(run: Path, tmp_path: Path) -> None:
    write_measured_run(tmp_path / "other", seed=2)
    directory = RunDirectory(run)
    found = measured(directory.read_lines("metrics"), (46,))
    step_s = found.step_s
    assert 0.8 <= step_s <= 0.801
    check = {row["id"]: row for row in answer("compare", str(run))["time"]}
    assert check["time.step"]["measured"] == step_s
    explained = answer("explain", str(run))
    assert explained["pace"]["steady_s"] == explained["step"]["measured"] == step_s
    assert answer("compare", str(run), str(tmp_path / "other"))["sides"][0]["step_s"] == step_s
    listed = {Path(one["path"]).name: one for one in answer("runs", str(tmp_path))["runs"]}
    assert listed["mine"]["step_s"] == step_s
    assert listed["mine"]["tokens_per_s"] == pytest.approx(128 / step_s)
    assert listed["mine"]["mfu"] == pytest.approx(0.1 * 0.9 / step_s)
    known = page.Runs([tmp_path])
    id, mine = next((id, one) for id, one in known.all().items() if one.path.name == "mine")
    shown = {one["id"]: one["value"] for one in page.page(id, mine, known.curve(id, mine))["now"]}
    assert shown["step"] == format_value(step_s, "duration")
    picked = {row["label"]: row["measured"] for row in runs.comparisons(known)["runs"][0]["rows"]}
    assert format_value(step_s, "duration") in picked.values()


def test_a_speed_that_changed_at_a_resume_is_said(run: Path, tmp_path: Path) -> None:
    write_measured_run(tmp_path / "other", seed=2)
    out = tmp_path / "report.html"
    said = [
        foretrain("compare", str(run)).stdout, foretrain("explain", str(run)).stdout,
        foretrain("compare", str(run), str(tmp_path / "other")).stdout,
    ]  # fmt: skip
    assert foretrain("report", str(run), "--out", str(out)).returncode == 0
    for text in (*said, out.read_text()):
        words = " ".join(text.split())
        assert "speed changed when the run was resumed: a step took 1.75 s in steps 0 to 45 and 80" in words


def test_a_steady_run_that_was_resumed_says_nothing_of_it(tmp_path: Path) -> None:
    path = write_measured_run(tmp_path / "steady", steps=100)
    found = measured(RunDirectory(path).read_lines("metrics"), (46,))
    assert found.note is None
    assert len(found.starts) == 2


def test_a_run_without_steps_keeps_what_its_record_says(tmp_path: Path) -> None:
    path = write_measured_run(tmp_path / "none")
    (path / "metrics.jsonl").unlink()
    assert measured([], ()) is None
    assert answer("runs", str(tmp_path))["runs"][0]["step_s"] is None


def test_only_a_run_with_a_checkpoint_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a temporary folder is long, and a table cuts what is beside it
    for name, status in (("a", "interrupted"), ("b", "killed"), ("c", "interrupted")):
        path = write_measured_run(tmp_path / name)
        record = json.loads((path / "run.json").read_text()) | {"status": status}
        (path / "run.json").write_text(json.dumps(record))
    (tmp_path / "c" / "checkpoints" / "step-0000000010").mkdir(parents=True)
    listed = foretrain("runs", ".").stdout
    assert listed.count("nothing saved") == 2
    assert listed.count("can be resumed") == 1
    rows = {Path(row["path"]).name: row["status_text"] for row in page.Runs([tmp_path]).listed()["runs"]}
    assert rows["a"] == "stopped, nothing saved"


def test_mfu_names_where_the_sources_of_the_peak_are() -> None:
    told = foretrain("mfu", "gpt2-124m", "--tokens-per-s", "100k", "--gpu", "4070").stdout
    assert 'Sources of the peak: `foretrain gpus "RTX 4070"`.' in told
    assert "http" not in told
