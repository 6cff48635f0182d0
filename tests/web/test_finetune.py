"""The page's answers about fine-tuning: what the terminal says, of a form, of a pasted config.json, of a trainer's config."""

import json
import shlex
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

import foretrain as library
from foretrain.advice.asked import Asked as Typed
from foretrain.advice.cards import compared
from foretrain.app.finetune import plan_question, question
from foretrain.app.planning import advise
from foretrain.base import messages
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS, FineTune
from foretrain.config.finetune.read import read_finetune, read_pasted, shortened
from foretrain.config.finetune.words import parse_words
from foretrain.config.hub.source import facts_of
from foretrain.config.options import OPTIONS
from foretrain.config.presets import models
from foretrain.hardware.catalogue import catalogue
from foretrain.predict.timing import PRICES
from foretrain.reports.document import cell_text
from foretrain.reports.html import block_json
from foretrain.reports.views import cards as cards_view
from foretrain.reports.views import finetune as finetune_view
from foretrain.reports.views.advice import short
from foretrain.reports.views.memory import phase_bars
from foretrain.reports.views.shared import card_memory
from foretrain.web import calls, routes
from tests.kit.command import foretrain
from tests.kit.finetune import small
from tests.kit.finetune_files import AXOLOTL, LLAMA_FACTORY
from tests.kit.page import GOOD, POSTED, client, get, post  # noqa: F401

SMALL, CARD = "smollm2-135m", "RTX 3060 12GB"
OVER = {"model": "gpt2", "values": {"batch_size": "64"}, "gpu": CARD}
KNOWN = [name for name, model in models().items() if facts_of(model.config)]


def tuned(client: TestClient, what: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    card = {"gpu": "RTX 4090"} if what not in ("read", "form") else {}
    return post(client, f"/api/{what}", {"kind": "fine-tuning", **card, **body}, status)


def test_the_form_has_every_option_and_every_model(client: TestClient) -> None:
    found = tuned(client, "form", {})
    wanted = {option.name: option.default for option in FINETUNE_OPTIONS.values()}
    wanted |= ASKED
    wanted |= {option.name: option.default for option in OPTIONS.values() if option.group == "cost"}
    assert {field["name"]: field["default"] for field in found["fields"]} == wanted
    shown = [field["basic"] for field in found["fields"]]
    assert sum(shown) > 8
    assert shown == sorted(shown, reverse=True), "the basic ones come first"
    for field in found["fields"]:
        assert messages.has(f"page.group.{field['group']}"), field["name"]
        assert (field["type"] == "choice") == bool(field["choices"])
    assert [model["id"] for model in found["models"]] == KNOWN
    assert all(models()[model["id"]].repository in model["source"] for model in found["models"])
    assert {device["id"] for device in found["devices"]} - {"auto"} == {
        gpu.name for gpu in catalogue().values() if gpu.kind == "cuda"
    }


@pytest.mark.parametrize(
    "field", [field for field in calls.fields("fine-tuning") if field["stops"]], ids=lambda field: field["name"]
)
def test_a_slider_stops_only_where_its_option_may_stand(field: dict[str, Any]) -> None:
    assert field["stops"] == sorted(set(field["stops"]))
    assert 5 < len(field["stops"]) < 60
    for stop in (field["stops"][0], field["stops"][-1]):
        parse_words([f"--{field['name']}={stop}"])


def test_one_question_has_one_answer(client: TestClient) -> None:
    """A model, a method and a card, and nothing else said: one sequence at a time, with checkpointing."""
    typed = plan_question(question("qwen3-8b", ["--method=qlora"]), "RTX 4090")
    assert (typed.tune.batch_size, typed.tune.seq_len, typed.tune.gradient_checkpointing) == (1, 2048, True)
    in_python = library.plan("qwen3-8b", gpu="RTX 4090", method="qlora")
    on_the_page = tuned(client, "plan", {"model": "qwen3-8b", "values": {"method": "qlora"}})
    assert in_python.memory == typed.memory
    assert on_the_page["config"] == {**typed.tune.model_dump(), "dtype": "auto", "amp": "auto", **PRICES.model_dump()}
    short = plan_question(question("gpt2", ["--method=lora"]), "RTX 4090")
    assert short.tune.seq_len == short.facts.max_positions == 1024


def test_what_a_pasted_file_leaves_out_is_its_trainers_default(client: TestClient) -> None:
    read = tuned(client, "read", {"text": "base_model: gpt2\nmicro_batch_size: 4\nadapter: lora"})
    assert read["values"]["gradient_checkpointing"] is False
    assert (read["values"]["batch_size"], read["values"]["method"]) == (4, "lora")


def test_a_plan_on_the_page_is_the_terminals(client: TestClient) -> None:
    values = {"method": "lora", "seq_len": "512", "batch_size": 2, "gradient_checkpointing": True, "max_steps": "10"}
    asked = {"model": SMALL, "values": values, "gpu": "RTX 4090", "others": "2GB"}
    answer = tuned(client, "plan", asked)
    words = ["--method=lora", "--seq_len=512", "--batch_size=2", "--gradient_checkpointing", "--max_steps=10"]
    plan = plan_question(question(SMALL, words), "RTX 4090", "2GB")
    shown = finetune_view.screen(plan, Typed(quiet=True))
    assert answer["rows"] == [[row.label.text(), cell_text(row.text)] for row in shown.rows]
    of_the_card = card_memory(plan.gpu)[0]
    assert [part["text"] for part in answer["verdict"]] == [shown.lead[0].message.text(), of_the_card.message.text()]
    document = finetune_view.document(plan)
    assert [part["title"] for part in answer["sections"]] == [part.title.text() for part in document.sections[1:]]
    told = foretrain(*shlex.split(answer["command"])[1:], "--full").stdout
    assert "".join(answer["verdict"][0]["text"].split()) in "".join(told.split())
    for row in answer["sections"][1]["blocks"][0]["rows"]:  # the phases
        assert all(cell in told for cell in row), row
    figures = {figure["id"]: figure for figure in answer["figures"]}
    assert {"memory_needed", "available", "step", "speed", "mfu", "wall", "energy", "cost"} == set(figures)
    assert {figure["source"] for figure in figures.values()} == {"estimated", "RTX 4090"}
    drawn = phase_bars(plan, plan.memory)
    assert answer["pictures"] == json.loads(json.dumps([block_json(drawn)]))
    for bar, phase in zip(drawn.bars, plan.memory.phases, strict=True):
        assert sum(size for _, size in bar.parts) == max(phase.needed_expected_bytes, phase.allocated_bytes)
    tune = FineTune(**{**values, "seq_len": 512, "max_steps": 10}).model_dump(mode="json")
    assert answer["config"] == {**tune, **PRICES.model_dump()}


def test_prices_are_those_of_any_run(client: TestClient) -> None:
    values = {"method": "lora", "seq_len": "256", "max_steps": "1000"}
    asked = {"model": SMALL, "values": {**values, "price_per_hour": "2", "currency": "USD"}, "gpu": "RTX 4090"}
    answer = tuned(client, "plan", asked)
    cost = next(figure["value"] for figure in answer["figures"] if figure["id"] == "cost")
    words = [f"--{key}={value}" for key, value in asked["values"].items()]  # type: ignore[union-attr]
    plan = plan_question(question(SMALL, words), "RTX 4090")
    assert plan.timing.rent_expected is not None
    assert cost == f"{messages.format_value(plan.timing.rent_expected, 'money')} USD"
    bad = tuned(client, "plan", {"model": SMALL, "values": {"price_per_hour": "much"}}, 422)
    assert [problem["key"] for problem in bad["problems"]] == ["price_per_hour"]


def test_a_pasted_config_is_the_model(client: TestClient) -> None:
    config = {**models()[SMALL].config, "architectures": ["LlamaForCausalLM"], "_name_or_path": "somebody/mine",
              "transformers_version": "5.0", "id2label": {str(i): f"LABEL_{i}" for i in range(500)}}  # fmt: skip
    read = tuned(client, "read", {"name": "config.json", "text": json.dumps(config)})
    assert (read["model"], read["values"]) == ("mine", {})
    assert len(read["config"]) < 500, "it fits into a link"
    assert facts_of(json.loads(read["config"])) == facts_of(models()[SMALL].config)
    values = {"method": "lora", "seq_len": "512"}
    own = tuned(client, "plan", {"model": "mine", "config": read["config"], "values": values})
    preset = tuned(client, "plan", {"model": SMALL, "values": values})
    assert own["title"] == preset["title"].replace(SMALL, "mine")
    assert (own["figures"], own["pictures"], own["sections"]) == (
        preset["figures"],
        preset["pictures"],
        preset["sections"],
    )


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_left_out_of_a_config_decides_nothing(name: str) -> None:
    found = read_pasted(json.dumps(dict(models()[name].config)), "config.json")
    assert found.model
    assert facts_of(json.loads(shortened(found.model))) == facts_of(models()[name].config)


@pytest.mark.parametrize(("text", "model"), [(AXOLOTL, "llama-3.2-1b"), (LLAMA_FACTORY, "qwen3-4b")])
def test_a_trainers_config_sets_the_form(client: TestClient, tmp_path: Any, text: str, model: str) -> None:
    """What the form then says is what the terminal plans of the file."""
    read = tuned(client, "read", {"name": "run.yaml", "text": text})
    assert (read["model"], read["config"]) == (model, "")
    (tmp_path / "run.yaml").write_text(text)
    source, tune, reading = read_finetune(str(tmp_path / "run.yaml"))
    assert source.name == model
    words = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in read["values"].items()
    ]
    assert FineTune(**parse_words(words)[0]) == tune
    notes = [messages.say(f"note.{note.id}", **{**note.values, "where": "run.yaml"}) for note in reading.notes]
    assert read["notes"] == notes


def test_unknown_keys_and_models_are_named(client: TestClient) -> None:
    text = (
        "base_model: somebody/unheard-of\nadapter: lora\nmicro_batch_size: 2\nmicro_batchsize: 3\nsequence_len: 512\n"
    )
    read = tuned(client, "read", {"text": text})
    assert "model" not in read
    assert "somebody/unheard-of" in read["notes"][0]
    assert any("micro_batchsize" in note for note in read["notes"])
    assert read["values"]["batch_size"] == 2
    read = tuned(client, "read", {"text": "per_device_train_batch_size: 2\nbf16: true\n"})
    assert messages.say("page.finetune.no_model") in read["notes"]
    script = (
        "from trl import SFTConfig\nargs = SFTConfig(output_dir='x', per_device_train_batch_size=4, max_length=256)\n"
    )
    read = tuned(client, "read", {"text": script})
    assert (read["values"]["batch_size"], read["values"]["seq_len"]) == (4, 256)


HOSTILE = [
    "base_model: !!python/object/apply:os.system ['touch pwned']",
    "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}' if i else '*a'] * 9)}]" for i in range(9)),
    "[" * 500, "{" * 500, '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": -1}', "\x00", "", "- 1\n- 2",
    '{"model_type": "llama", "hidden_size": 1e999, "architectures": []}', "import os\nos.system('touch pwned')",
    '{"peft_type": "LORA"}', '{"peft_type": "LORA", "base_model_name_or_path": ["/etc/passwd"]}',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_gets_a_sentence(client: TestClient, tmp_path: Any, text: str) -> None:
    answer = tuned(client, "read", {"text": text}, 422)
    assert answer["problems"][0]["message"]
    assert not list(tmp_path.rglob("pwned"))


def test_no_path_is_opened_and_nothing_is_fetched(client: TestClient, tmp_path: Any) -> None:
    """The client's folder is tmp_path: a file or folder there with a model's name is not looked at."""
    (tmp_path / "config.json").write_text(json.dumps(dict(models()[SMALL].config)))
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    for name in (
        str(tmp_path),
        "config.json",
        ".",
        "~",
        "/etc/passwd",
        "hf:Qwen/Qwen3-0.6B-of-nobody",
        "file:///etc/passwd",
    ):
        answer = tuned(client, "plan", {"model": name}, 422)
        assert answer["id"].startswith("config.hub_unknown"), name
        read = tuned(client, "read", {"text": f"base_model: {name}\nadapter: lora\nmicro_batch_size: 1\n"})
        assert "model" not in read, name
    assert tuned(client, "plan", {"model": "gpt2", "values": {"seq_len": "128"}})["title"].startswith("gpt2 ")
    for key in ("model", "accelerate"):  # words of the terminal that name files
        answer = tuned(client, "plan", {"model": SMALL, "values": {key: str(tmp_path)}}, 422)
        assert [problem["id"] for problem in answer["problems"]] == ["config.finetune_no_option"]


def test_a_pasted_model_cannot_keep_the_page_busy(client: TestClient) -> None:
    config = json.dumps({**models()[SMALL].config, "num_hidden_layers": 257})
    answer = tuned(client, "plan", {"model": "mine", "config": config}, 422)
    assert answer["id"] == "config.hub_bad_size"
    assert "257" in answer["message"]


def test_every_wrong_option_is_said_at_its_field(client: TestClient) -> None:
    values = {"seq_len": "many", "lora_r": 0, "optim": "lion", "batch_sizes": "2"}
    answer = tuned(client, "plan", {"model": SMALL, "values": values}, 422)
    assert [problem["key"] for problem in answer["problems"]][:3] == ["seq_len", "lora_r", "optim"]
    assert "batch-size" in answer["problems"][3]["message"]


def test_what_is_pasted_is_bounded(client: TestClient) -> None:
    tuned(client, "read", {"text": "a" * 200_001}, 400)
    tuned(client, "plan", {"config": "{" + " " * 100_001 + "}"}, 400)
    tuned(client, "plan", {"values": {f"a{i}": 1 for i in range(201)}}, 400)


def test_advice_is_the_terminals_and_holds(client: TestClient) -> None:
    answer = calls.advise({"kind": "fine-tuning", **OVER})
    found = advise("gpt2", CARD, batch_size=64, method="full")
    assert [change["text"] for change in answer["changes"]] == [short(None, change) for change in found.advised[:8]]
    best = answer["changes"][0]
    table = answer["sections"][answer["list"]]["blocks"][0]
    assert len(table["rows"]) == len(answer["changes"])
    changed = tuned(client, "plan", {**OVER, "values": {**OVER["values"], **best["set"]["values"]}})  # type: ignore[dict-item]
    assert (tuned(client, "plan", OVER)["fits"], changed["fits"]) == (False, True)
    assert changed["figures"][0]["value"] in table["rows"][0]
    assert calls.advise({"kind": "fine-tuning", **OVER, "goal": "quality"})["changes"] == []  # none of them fits


def test_cards_beside_each_other_are_the_terminals(client: TestClient) -> None:
    asked = {"model": SMALL, "values": {"method": "lora", "seq_len": "256"}, "cards": ["RTX 4090", CARD, "RTX 4090"]}
    answer = tuned(client, "cards", asked)
    found = question(SMALL, ["--method=lora", "--seq_len=256"])
    plans = [plan_question(found, name) for name in ("RTX 4090", CARD)]
    table, *_ = cards_view.document(plans, compared(plans)).sections[1].blocks
    assert answer["sections"][1]["blocks"][0]["rows"] == [[cell_text(cell) for cell in row] for row in table.rows]  # type: ignore[union-attr]


@pytest.mark.parametrize("gpu", ["cpu", "M3 Max 40-core", "RTX 9999"])
def test_other_devices_get_a_sentence(client: TestClient, gpu: str) -> None:
    assert tuned(client, "plan", {"model": SMALL, "gpu": gpu}, 422)["problems"][0]["message"]


def test_the_answer_speaks_the_language(client: TestClient) -> None:
    asked = {"kind": "fine-tuning", "model": SMALL, "values": {"method": "lora", "seq_len": "256"}, "gpu": "RTX 4090"}
    for id in messages.languages():
        headers = {**GOOD, **POSTED, "x-foretrain-language": id}
        answer = client.post("/api/plan", headers=headers, json=asked).json()
        with messages.speaking(id):
            plan = plan_question(question(SMALL, ["--method=lora", "--seq_len=256"]), "RTX 4090")
            assert answer["verdict"][0]["text"] == finetune_view.screen(plan, Typed()).lead[0].message.text()
            form = client.post("/api/form", headers=headers, json={"kind": "fine-tuning"}).json()
            help = {field["name"]: field["help"] for field in form["fields"]}["seq_len"]
            assert help == messages.option_help("seq_len", FINETUNE_OPTIONS["seq_len"].help, "finetune_knob")


def test_a_trace_of_a_form_can_be_begun_and_stopped(client: TestClient) -> None:
    refused = tuned(client, "exact", {**OVER, "values": {"batch_size": "0"}}, 422)
    assert "batch_size" in json.dumps(refused)
    if routes.service.why_not():
        pytest.skip("nothing can be traced here")
    job = tuned(client, "exact", OVER, 202)["job"]
    post(client, f"/api/jobs/{job}/stop", {})
    assert "stopped" in get(client, f"/api/jobs/{job}", 422)["message"]


@pytest.mark.slow
def test_a_traced_form_is_the_terminals_exact_answer(client: TestClient) -> None:
    config = json.dumps(small("qwen3-0.6b"))
    asked = {"model": "mine", "config": config, "gpu": CARD, "values": {"method": "lora"}}
    job = tuned(client, "exact", asked, 202)["job"]
    plan = get(client, f"/api/jobs/{job}")
    assert "traced" in json.dumps([plan["title"], plan["figures"]])
    made = calls.traced({"kind": "fine-tuning", **asked}, lambda text: None)
    assert plan["strip"] == made["strip"]
    assert plan["pictures"] == made["pictures"]
