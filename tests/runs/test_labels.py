"""Names, notes and tags of runs: where they are kept, where they show, and what they never change."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from foretrain.app.compare import compare
from foretrain.app.run_report import gather
from foretrain.comparison.compare import Comparison
from foretrain.reports import html
from foretrain.reports.views import run as run_view
from foretrain.runs import state
from foretrain.runs.state import UNSAID, Label, changed
from foretrain.web.runs import Runs, page
from tests.kit.command import foretrain, refused
from tests.kit.page import EVIL_NAME, write_curve, write_run
from tests.kit.tiny import write_dataset

TRAIN = (
    "train", "baby", "--device=cpu", "--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=2",
    "--max_iters=4", "--lr_decay_iters=4", "--warmup_iters=1", "--eval_interval=2", "--eval_iters=1", "--out_dir=run",
    "--dataset=toy", "--vocab_size=96", "--quiet",
)  # fmt: skip


def test_a_label_is_kept_and_read_and_an_empty_one_is_no_file(tmp_path: Path) -> None:
    said = changed(UNSAID, name="  wider MLP ", note="twice the width\nof before", tags=["sweep", "a b", "sweep"])
    assert said == Label(name="wider MLP", note="twice the width\nof before", tags=("sweep", "a b"))
    state.write(tmp_path, said)
    assert state.read_label(tmp_path) == said
    assert json.loads((tmp_path / "label.json").read_text())["schema"] == "foretrain.label/1"
    assert changed(said, name="", tags=["new"], without=["sweep"]) == Label(note=said.note, tags=("a b", "new"))
    assert said.with_more(Label(name="other", tags=("c",))) == said.model_copy(
        update={"name": "other", "tags": ("sweep", "a b", "c")}
    )
    state.write(tmp_path, changed(said, name="", note="", without=said.tags))
    assert list(tmp_path.iterdir()) == []
    state.write(tmp_path, UNSAID)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"name": 7}', '{"tags": "x"}', '{"tags": [""]}', '{"name": "' + "x" * 81 + '"}', "\xff", "[" * 9999]
)  # fmt: skip
def test_a_damaged_label_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "label.json").write_text(text, "latin-1")
    assert state.read_label(tmp_path) == UNSAID


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ({"name": "x" * 81}, "usage.label_name"), ({"note": "x" * 2001}, "usage.label_note"),
        ({"tags": ["x" * 41]}, "usage.label_tag"), ({"tags": [" "]}, "usage.label_tag"),
        ({"tags": [str(i) for i in range(21)]}, "usage.label_tags"),
    ],
)  # fmt: skip
def test_what_is_too_long_is_said(words: dict[str, Any], id: str) -> None:
    with refused(id, code=2):
        changed(UNSAID, **words)


def test_train_keeps_what_it_was_told_and_a_resume_adds_to_it(own_directory: Path) -> None:
    write_dataset(own_directory / "data" / "toy")
    foretrain(*TRAIN, "--name", "first", "--tag", "sweep", "--tag", "small", "--note", "why", code=0)
    before = Path("run/run.json").read_text()
    assert state.read_label(Path("run")) == Label(name="first", note="why", tags=("sweep", "small"))
    assert "sweep" not in before
    assert "sweep" not in Path("run/config.toml").read_text()
    foretrain(*TRAIN, "--max_iters=6", "--resume", "auto", "--tag", "longer", code=0)
    assert state.read_label(Path("run")) == Label(name="first", note="why", tags=("sweep", "small", "longer"))
    assert json.loads(Path("run/run.json").read_text())["steps_done"] == 6
    refused = foretrain(*TRAIN, "--name", "x" * 81)
    assert (refused.returncode, refused.stderr.count("\n"), Path("run-2").exists()) == (2, 1, False)


def test_runs_are_named_listed_and_filtered() -> None:
    for name in ("a", "b", "c"):
        write_run(Path(name))
    plain = foretrain("runs").stdout
    assert not re.search(r"\b(name|tags)\b", plain)
    named = foretrain(
        "runs", "a", "--name", "wider MLP", "--note", "why", "--add-tag", "sweep", "--add-tag", "x", code=0
    )
    assert "wider MLP" in named.stdout
    assert foretrain("runs", "a", "b", "--add-tag", "sweep").returncode == 0
    shown = foretrain("runs").stdout
    assert "sweep, x" in shown
    assert len(re.findall(r"^\s*[abc]  ", shown, re.MULTILINE)) == 3
    told = json.loads(foretrain("runs", "--tag", "sweep", "--json").stdout)
    assert [(run["path"], run["label"]["tags"]) for run in told["runs"]] == [("a", ["sweep", "x"]), ("b", ["sweep"])]
    both = json.loads(foretrain("runs", "--tag", "sweep", "--tag", "x", "--json").stdout)
    assert [run["label"]["name"] for run in both["runs"]] == ["wider MLP"]
    assert json.loads(foretrain("runs", "--tag", "none", "--json").stdout)["runs"] == []
    foretrain("runs", "a", "--remove-tag", "sweep", "--name", "")
    assert state.read_label(Path("a")) == Label(note="why", tags=("x",))


def test_what_cannot_be_named_is_said_and_nothing_is_written() -> None:
    for name in ("a", "b"):
        write_run(Path(name))
    Path("empty").mkdir()
    for words, code in (
        (("--name", "x"), 2), (("a", "b", "--name", "x"), 2), (("a", "empty", "--add-tag", "x"), 7),
        (("a", "--name", "x" * 81), 2), (("a", "--add-tag", "x" * 41), 2), (("missing", "--name", "x"), 7),
    ):  # fmt: skip
        told = foretrain("runs", *words)
        assert (told.returncode, told.stderr.count("\n"), told.stdout) == (code, 1, ""), words
    assert not list(Path().glob("*/label.json"))


def sides_of(*sources: str | Path) -> Comparison:
    found = compare(*sources)
    assert isinstance(found, Comparison)
    return found


def test_a_name_is_no_setting_that_is_compared() -> None:
    paths = [write_curve(Path(name), seed=seed).path for seed, name in enumerate(("one", "other"))]
    assert [side.label for side in sides_of(*paths).sides] == ["one", "other"]
    given = [f"x={paths[0]}", f"y={paths[1]}"]
    before = sides_of(*given)
    for path, name in zip(paths, ("mine", "yours"), strict=True):
        state.write(path, Label(name=name, note=name, tags=(name,)))
    assert [side.label for side in sides_of(*paths).sides] == ["mine", "yours"]
    assert sides_of(*given) == before


def test_hostile_words_stay_text() -> None:
    evil = f"{EVIL_NAME}\u202e</script>\n[red]x"
    run = write_curve(Path("run"))
    (run.path / "label.json").write_text(json.dumps({"name": evil[:80], "note": evil, "tags": [evil[:40]]}))
    page = html.render(run_view.report(gather(run.path)))
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert "Note: " in page
    shown = foretrain("runs").stdout
    assert "<img src=x" in shown
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    told = foretrain("runs", "--json").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", told)
    assert json.loads(told)["runs"][0]["label"]["note"] == evil


def test_the_page_shows_what_a_run_is_called() -> None:
    pytest.importorskip("starlette")
    write_run(Path("runs/plain"))
    run = write_run(Path("runs/said"))
    state.write(run.path, Label(name="wider MLP", note="twice\nthe width", tags=("sweep",)))
    for file in Path("runs/plain").iterdir():
        os.utime(file, (1e9, 1e9))
    known = Runs([Path("runs")])
    rows = {row["name"]: row for row in known.listed()["runs"]}
    assert rows.keys() == {"baby", "wider MLP"}
    assert (rows["wider MLP"]["tags"], rows["baby"]["tags"], rows["baby"]["note"]) == (["sweep"], [], "")
    id = rows["wider MLP"]["id"]
    seen = known.get(id)
    assert seen is not None
    shown = page(id, seen, known.curve(id, seen))
    assert (shown["name"], shown["note"], shown["tags"]) == ("wider MLP", "twice\nthe width", ["sweep"])


def test_a_folder_without_runs_says_so() -> None:
    assert "foretrain train baby" in foretrain("runs").stdout
    assert "No run here has this tag: odd" in foretrain("runs", "--tag", "odd").stdout
