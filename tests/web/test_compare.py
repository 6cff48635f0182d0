"""Runs beside each other on the page: what the report of the comparison says, for runs that go on, are damaged or gone."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from foretrain.base.messages import say
from foretrain.comparison.compare import compare
from foretrain.comparison.loss_axes import gather
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import take_apart
from foretrain.reports.document import Curves, Document, Figures, Paragraph, Table, Verbatim, cell_text
from foretrain.reports.html import block_json
from foretrain.reports.views import compare as compare_view
from foretrain.runs.folder import RunDirectory
from foretrain.web import child, routes
from tests.kit.page import EVIL_NAME, GOOD, ORIGIN, PORT, POSTED, TOKEN, get, post, traversals, write_curve, write_run


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_curve(tmp_path / "runs" / "slow")
    write_curve(tmp_path / "runs" / "quick", seed=2, rate=2e-3, knobs={"weight_decay": 0.3})
    return tmp_path / "runs"


@pytest.fixture
def client(roots: Path) -> Iterator[TestClient]:
    with TestClient(routes.create_app(PORT, TOKEN, [roots]), base_url=ORIGIN) as made:
        yield made


def ids(client: TestClient) -> dict[str, str]:
    return {Path(run["path"]).name: run["id"] for run in get(client, "/api/runs")["runs"]}


def beside(client: TestClient, *names: str) -> dict[str, Any]:
    known = ids(client)
    return post(client, "/api/compare", {"runs": [known[name] for name in names]})


def reported(*paths: Path) -> Document:
    """What `foretrain report A B` makes a file of."""
    subjects = [load(take_apart(str(path))) for path in paths]
    found = compare(subjects)
    facts = gather(subjects, found)
    return compare_view.report(found, facts.losses, dict(facts.verdicts), facts.checks, facts.sources)


def test_the_page_shows_what_the_report_of_the_comparison_says(client: TestClient, roots: Path) -> None:
    answer = beside(client, "slow", "quick")
    expected, document = reported(roots / "slow", roots / "quick"), answer["document"]
    assert (document["title"], document["subtitle"]) == (expected.title.text(), expected.subtitle.text())
    assert [one["title"] for one in document["sections"]] == [one.title.text() for one in expected.sections]
    pictures = 0
    for shown, section in zip(document["sections"], expected.sections, strict=True):
        for one, block in zip(shown["blocks"], section.blocks, strict=True):
            if isinstance(block, Paragraph):
                assert (one["text"], one["tone"]) == (block.message.text(), block.tone)
            elif isinstance(block, Table):
                assert one["rows"] == [[cell_text(cell) for cell in row] for row in block.rows]
            else:
                assert not isinstance(block, Verbatim | Figures)
                assert one == json.loads(json.dumps(block_json(block)))
                assert one["numbers"]["rows"], one["title"]
                pictures += 1
    assert pictures >= 3
    curves = next(block for section in expected.sections for block in section.blocks if isinstance(block, Curves))
    assert [axis.format for axis in curves.axes] == ["count", "duration", "energy", "money", "number"]
    text = json.dumps(document)
    assert "learning_rate" in text
    assert say("side.settle") in text  # two settings differ, so there are runs that would settle it
    assert "quick" in document["sections"][0]["blocks"][0]["text"]
    assert answer["command"].split()[:2] == ["foretrain", "report"]
    assert [run["notes"] for run in answer["runs"]] == [[], []]


def test_the_first_run_is_the_one_that_others_are_held_against(client: TestClient) -> None:
    one, other = beside(client, "slow", "quick"), beside(client, "quick", "slow")
    assert [run["name"] for run in one["runs"]] == ["slow", "quick"]
    assert [run["name"] for run in other["runs"]] == ["quick", "slow"]
    assert one["document"]["title"] != other["document"]["title"]


def test_living_run_is_compared_so_far_and_not_touched(
    client: TestClient, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = write_curve(roots / "live", steps=120, seed=3, rate=2e-3, status="running", knobs={"max_iters": 900})
    with (live.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 120, "lo')  # being written
    live.acquire()
    try:
        before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in live.path.iterdir()}
        locks: list[Any] = []
        monkeypatch.setattr(RunDirectory, "is_locked", lambda self: locks.append(self.path))
        answer = beside(client, "slow", "live")
        assert not locks  # trying a lock would hold it for a moment
        assert before == {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in live.path.iterdir()}
    finally:
        live.release()
    state = answer["runs"][1]
    assert (state["status"], state["steps"], state["of"]) == ("running", 120, 900)
    assert state["notes"] == [say("page.beside.so_far")]
    curve = next(b for s in answer["document"]["sections"] for b in s["blocks"] if b["kind"] == "chart")["numbers"]
    assert curve["columns"][-2] == say("axis.step")
    assert max(int(row[-2]) for row in curve["rows"] if "live" in row[0]) == 119


def test_unreadable_run_is_named_and_the_rest_compared(client: TestClient, roots: Path) -> None:
    write_curve(roots / "broken", steps=20, seed=4)
    write_curve(roots / "unplanned", steps=40, seed=5, rate=3e-3)
    known = ids(client)
    (roots / "broken" / "run.json").write_text("{")
    (roots / "unplanned" / "plan.json").write_text("[]")
    asked = [known["slow"], known["broken"], "f" * 16, known["unplanned"]]
    answer = post(client, "/api/compare", {"runs": asked})
    problems = [run["problem"] for run in answer["runs"]]
    assert problems[0] == problems[3] == ""
    assert "run.json" in problems[1]
    assert problems[2] == say("page.beside.gone")
    assert "plan.json" in answer["runs"][3]["notes"][0]
    assert answer["document"]["sections"]
    few = post(client, "/api/compare", {"runs": asked[:3]})
    assert (few["document"], few["problem"]) == (None, say("page.beside.too_few"))
    assert post(client, "/api/compare", {"runs": [known["slow"]] * 2})["problem"]  # the same run twice
    (roots / "slow" / "metrics.jsonl").unlink()
    (roots / "slow" / "metrics.jsonl").mkdir()
    assert beside(client, "quick", "unplanned")["document"]


def test_only_two_to_four_runs_by_the_ids_of_the_list(client: TestClient, roots: Path) -> None:
    (one, other) = ids(client).values()
    for wrong in ([], [one], [one] * 5, [one, 5], [one, "x" * 65], one, None, [one, [other]]):
        assert post(client, "/api/compare", {"runs": wrong}, 400)["problems"][0]["message"]
    write_run(roots.parent / "elsewhere")
    paths = [str(roots / "quick"), str(roots.parent / "elsewhere"), "../elsewhere", "quick"]
    for text in [*paths, *traversals()[::4]]:
        if len(text) > 64:  # longer than any id: a folder of tests may be named at length
            post(client, "/api/compare", {"runs": [one, text]}, 400)
            continue
        answer = post(client, "/api/compare", {"runs": [one, text]})
        assert answer["runs"][1]["problem"] == say("page.beside.gone"), text
        assert answer["document"] is None


def test_a_large_comparison_is_made_in_a_process_and_is_the_same(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = beside(client, "slow", "quick")
    started: list[Any] = []
    plain = child.start
    monkeypatch.setattr(child, "start", lambda work: started.append(plain(work)) or started[-1])
    monkeypatch.setattr(routes, "LARGE_BYTES", 0)
    known = ids(client)
    asked = {"runs": [known["slow"], known["quick"]]}
    answer = client.post("/api/compare", headers={**GOOD, **POSTED, "x-foretrain-language": "ar"}, json=asked).json()
    assert say("side.settle") not in json.dumps(answer, ensure_ascii=False)  # in the language of the request
    assert beside(client, "slow", "quick") == small
    assert [each.process.poll() for each in started] == [0, 0]
    monkeypatch.setattr(routes, "TIMEOUT_S", 0.05)
    assert "0 s" in post(client, "/api/compare", asked, 422)["message"]
    monkeypatch.setattr(child, "start", lambda work: started.append(plain("no such")) or started[-1])
    monkeypatch.setattr(routes, "TIMEOUT_S", 60.0)
    assert "exit 1" in post(client, "/api/compare", asked, 422)["message"]
    assert all(each.process.poll() is not None for each in started)


def damaged(text: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(text)), chance.randrange(1, 60)
    junk = chance.choice(
        [b"", b"null", b"-1", b"1e400", b"NaN", b'"\\ud800"', b"\x00", b"\xff", b"[[[", b"\n", b"9" * 30]
    )
    return text[:at] + junk + text[at + length :]


def test_no_damage_of_a_runs_files_is_an_internal_error(client: TestClient, roots: Path) -> None:
    chance = random.Random(11)
    asked = {"runs": list(ids(client).values())}
    whole = {name: (roots / "quick" / name).read_bytes() for name in ("run.json", "metrics.jsonl", "plan.json")}
    for number in range(60):
        for name, text in whole.items():
            (roots / "quick" / name).write_bytes(damaged(text, chance) if number % 3 or name == "run.json" else text)
        answer = client.post("/api/compare", headers={**GOOD, **POSTED}, json=asked)
        assert answer.status_code == 200, answer.text[:300]
        found = answer.json()
        assert found["document"] or found["problem"]
        for id in asked["runs"]:
            for part in ("", "/report"):
                alone = client.get(f"/api/runs/{id}{part}", headers=GOOD)
                assert alone.status_code == 200 or alone.json()["message"], alone.text[:300]


def test_a_runs_name_stays_text(client: TestClient, roots: Path) -> None:
    write_curve(roots / "evil<img src=x>\x1b[31m", name=EVIL_NAME, steps=30, seed=6)
    if os.name == "posix":
        write_curve(roots / os.fsdecode(b"latin\xe9"), steps=30, seed=7, rate=2e-3)
    names = [name for name in ids(client) if not name.isalpha()]
    text = json.dumps(beside(client, "slow", *names))
    assert "\\u001b" not in text
    assert "evil<img src=x>" in text
