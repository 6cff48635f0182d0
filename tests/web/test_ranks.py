"""Several cards on the page: the strategies side by side, advice that can be applied, and what is answered for one."""

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from foretrain.app.planning import plan
from foretrain.base import messages
from foretrain.base.messages import say
from foretrain.base.units import format_bytes
from foretrain.reports.views import cluster as cluster_view
from foretrain.reports.views.lead import strategy
from foretrain.web import calls
from foretrain.web.form import Form
from tests.kit.page import GOOD, POSTED, client, post  # noqa: F401

VALUES = {
    "n_layer": "3", "n_head": "4", "n_embd": "256", "block_size": "256", "batch_size": "4", "vocab_size": "8192",
    "gradient_accumulation_steps": "8", "compile": "false",
}  # fmt: skip
ASKED: dict[str, Any] = {"model": "gpt2-124m", "values": VALUES, "gpu": "RTX 3090", "count": "2", "others": "1GB"}


def test_several_cards_are_the_plan_of_the_command_line(client: TestClient) -> None:
    """One use case: the strategies, their needs and the sentence are those of `plan --gpus` with the same words."""
    answer = post(client, "/api/plan", ASKED)
    made = plan("gpt2-124m", gpus="2 x RTX 3090", used_by_others="1GB", **VALUES)
    rows = {row[0]: row for row in answer["table"]["rows"]}
    assert list(rows) == ["DDP", "ZeRO-1", *(row for row in rows if row.startswith("FSDP2"))]
    assert len(rows) == len({rank.strategy for rank in made.ranks})
    best = made.best
    line = rows[strategy(best).text()]
    assert line[1] == "fits"
    assert format_bytes(best.memory.needed_bytes).removesuffix(" GiB") in " ".join(line)
    pays = cluster_view.pays(made)
    assert pays.text() in [text for _, text in answer["rows"]]
    assert len(answer["strip"]) == len(rows)
    assert answer["pictures"] == []
    assert "--gpus '2 x RTX 3090'" in answer["command"]


def test_one_card_is_answered_as_before(client: TestClient) -> None:
    one = {**ASKED, "count": "1"}
    same = post(client, "/api/plan", one)
    assert same == post(client, "/api/plan", {key: value for key, value in ASKED.items() if key != "count"})
    assert same["table"] is None
    assert "--gpus" not in same["command"]


@pytest.mark.parametrize("count", ["0", "-2", "1.5", "many", "99999", "²"])
def test_what_is_no_number_of_cards_is_one_sentence(client: TestClient, count: str) -> None:
    answer = client.post("/api/plan", headers={**GOOD, **POSTED}, json={**ASKED, "count": count})
    assert answer.status_code == 422
    assert answer.json()["id"] == "usage.too_many_ranks" if count == "99999" else "usage.gpus"


def test_what_cannot_be_shared_is_one_sentence(client: TestClient) -> None:
    for asked, id in (({"count": "3"}, "config.ranks_indivisible_near"), ({"gpu": "cpu"}, "usage.cluster_of_cuda")):
        answer = client.post("/api/plan", headers={**GOOD, **POSTED}, json={**ASKED, **asked})
        assert answer.status_code == 422
        assert answer.json()["id"] == id


def test_what_is_answered_for_one_card_says_so(client: TestClient) -> None:
    """Never the answer of one card where the form says two."""
    assert post(client, "/api/cards", {**ASKED, "cards": ["RTX 4090"]}, 422)["id"] == "usage.cluster_two"
    assert post(client, "/api/advice", {**ASKED, "trainer": "nanogpt"}, 422)["id"] == "usage.cluster_trainer"


def test_advice_can_be_applied_and_then_holds(client: TestClient) -> None:
    """What a change sets makes the form that change: a new plan needs what was promised."""
    answer = calls.advise({**ASKED, "goal": "speed"})
    table = answer["sections"][answer["list"]]["blocks"][0]
    assert len(table["rows"]) == len(answer["changes"])
    assert {bool(change["set"]) for change in answer["changes"]} == {True, False}  # no field is for NVLink
    column = table["columns"].index(say("column.needed"))
    for change, row in zip(answer["changes"], table["rows"], strict=True):
        if not change["set"]:
            continue
        values = {**VALUES, **{name: str(value) for name, value in change["set"]["values"].items()}}
        again = post(client, "/api/plan", {**ASKED, **change["set"], "values": values})
        strategies = again["sections"][0]["blocks"][0]
        needed = strategies["columns"].index(say("column.needed"))
        assert row[column] in [each[needed] for each in strategies["rows"]], change


@pytest.mark.parametrize("language", ["ar", "hi"])
def test_the_strategies_are_said_in_each_language(client: TestClient, language: str) -> None:
    english = post(client, "/api/plan", ASKED)
    with messages.speaking(language):
        _, other = calls.plan(Form.model_validate(ASKED))
        assert say("page.count") != say("page.count", "en")
    assert other["table"]["columns"] != english["table"]["columns"]
    assert other["rows"] != english["rows"]
