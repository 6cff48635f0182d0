"""One question has one answer: the page's record of a form is the terminal's JSON of its command line, to the byte."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from foretrain.advice.advisor import advise
from foretrain.advice.record import SCHEMA as ADVICE
from foretrain.hardware import devices
from foretrain.predict.plan import SCHEMA
from foretrain.web.form import Form, line_of
from tests.kit.command import foretrain
from tests.kit.data import shards
from tests.kit.page import client, post  # noqa: F401

PRETRAINED: dict[str, Any] = {"model": "gpt2-124m", "gpu": "RTX 4070", "others": "2 GB"}
TUNED: dict[str, Any] = {"kind": "fine-tuning", "model": "gpt2", "gpu": "RTX 3060 12GB"}
GENERATED: dict[str, Any] = {"kind": "generation", "model": "qwen3-8b", "gpu": "RTX 3060 12GB"}
FORMS: dict[str, dict[str, Any]] = {
    "pretraining": {**PRETRAINED, "values": {"batch_size": "32", "compile": False, "price_per_hour": 0.3}},
    "its dataset": {**PRETRAINED, "values": {"dataset": "mine"}},  # prepared by foretrain: there are notes of its data
    "its batch": {**PRETRAINED, "values": {"batch_size": "auto", "total_batch_size": 524288}},
    "this machine": {"model": "gpt2-124m", "gpu": "auto", "values": {"device": "cpu"}},
    "no preset": {"gpu": "cpu", "values": {"n_layer": "2"}},
    "several cards": {**PRETRAINED, "count": "2", "values": {"strategy": "fsdp"}},
    "fine-tuning": {**TUNED, "values": {"batch_size": "2", "lora_r": "8"}, "others": "1 GB"},  # a rank does nothing
    "QLoRA": {**TUNED, "model": "qwen3-8b", "values": {"method": "qlora", "unsloth": True, "price_per_hour": "0.5"}},
    "fine-tuning on cards": {**TUNED, "count": "2", "values": {"method": "lora"}},
    "text": {**GENERATED, "values": {"weights": "q4_k_m", "context": "8192"}, "others": "1GB"},
    "text on cards": {**GENERATED, "count": "2"},
}


def told(*words: str) -> dict[str, Any]:
    ended = foretrain(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(autouse=True)
def unchanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: None)  # which changes from one moment to the next
    shards(Path("data/mine"))


@pytest.mark.parametrize("kind", FORMS)
def test_a_plan_of_the_page_is_the_terminals(kind: str) -> None:
    form = Form.model_validate(FORMS[kind])
    line = line_of(form)
    (found,) = line.request().forecasts()
    plan = found.plan
    answer = told(*shlex.split(line.command())[1:])
    del answer["advice"]
    assert json.dumps(json.loads(json.dumps(plan.to_json(schema=SCHEMA)))) == json.dumps(answer)


@pytest.mark.parametrize("kind", ["pretraining", "several cards", "fine-tuning", "text"])
def test_advice_of_the_page_is_the_terminals(kind: str) -> None:
    form = Form.model_validate({**FORMS[kind], "goal": "fit"})
    request, words = line_of(form).request(), shlex.split(line_of(form).command())[2:]
    (found,) = request.forecasts()
    plan = found.plan
    answer = told("advise", *words, "--goal", "fit", "--top", "100")
    assert json.loads(json.dumps(advise(plan, goal="fit").to_json(schema=ADVICE))) == answer


WRONG: dict[str, dict[str, Any]] = {
    "a card": {**PRETRAINED, "gpu": "RTX 9999"},
    "others": {**PRETRAINED, "others": "2 chairs"},
    "others beyond": {**PRETRAINED, "others": "900GB"},
    "cards": {**PRETRAINED, "count": "many"},
    "shares": {**PRETRAINED, "count": "3"},
    "two values": {**PRETRAINED, "values": {"n_head": "7", "batch_size": "0"}},
    "a rank": {**TUNED, "values": {"method": "lora", "lora_r": "0"}},
    "a processor": {**TUNED, "gpu": "cpu"},
    "a format": {**GENERATED, "values": {"weights": "q99"}},
    "an option of training": {**GENERATED, "values": {"method": "lora"}},
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_of_the_page_is_the_terminals_sentence(client: TestClient, what: str) -> None:
    answer = post(client, "/api/plan", WRONG[what], 422)
    form = Form.model_validate(WRONG[what])
    first = ["--inference"] if form.kind == "generation" else []
    cards = ["--gpu", form.gpu] if form.count == "1" else ["--gpus", f"{form.count} x {form.gpu}"]
    others = ["--used-by-others", form.others] if form.others else []
    words = [f"--{name}={value}" for name, value in form.values.items()]
    method = ["--method=full"] if form.kind == "fine-tuning" and "method" not in form.values else []
    ended = foretrain("plan", form.model, *first, *method, *words, *cards, *others, "--json")
    error = json.loads(ended.stdout)
    problems = {problem["message"] for problem in answer["problems"]}
    assert problems == {problem["message"] for problem in error.get("problems", [error])}
    assert not [message for message in problems if "\n" in message or "Traceback" in message]
