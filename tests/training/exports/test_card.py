"""Model cards, read back by huggingface_hub and by a Markdown parser, and the upload, against a Hub on this machine."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from foretrain.app.evaluation import of_run
from foretrain.app.export import CardFacts, card_of, export, facts_of, plain
from foretrain.base.errors import ExitCode
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import Scores, TaskScore, TextScore, TrainedRun
from foretrain.training.checkpoint import Progress
from tests.kit.command import foretrain, refused
from tests.kit.runs import write_measured_run
from tests.kit.tiny import tiny
from tests.kit.training import train

hub = pytest.importorskip("huggingface_hub")

HOSTILE = "a\n---\nlicense: mit\n---\n| <script>alert(1)</script> ![x](http://evil.example/x.png) **b** `c` www.evil.example &amp; @x"


def facts(path: Path, step: int = 60, elapsed_s: float = 6.0, **changes: Any) -> CardFacts:
    run = RunDirectory(path)
    record = run.read_record()
    record = TrainedRun.model_validate({**record.model_dump(), **changes})
    return facts_of(record, Progress(step=step, elapsed_s=elapsed_s), run.read_lines("metrics"), True)


def figures(found: CardFacts) -> dict[str, tuple[str, str]]:
    return {each.name: (each.value, each.how) for each in found.figures}


def read_back(text: str) -> Any:
    """The metadata as huggingface_hub reads it; it raises where the Hub would not take them."""
    return hub.ModelCard(text, ignore_metadata_errors=False).data


# -- the card ------------------------------------------------------------------------------------------------


def test_a_card_tells_the_run(tmp_path: Path) -> None:
    path = write_measured_run(tmp_path / "run", price_per_kwh=0.5, co2_per_kwh=400)
    found = facts(path, step=45)
    data = read_back(card_of(found))
    evaluated = [line for line in RunDirectory(path).read_lines("metrics") if line["kind"] == "evaluation"]
    last = next(line for line in evaluated if line["step"] == 40)  # the last one up to step 45
    assert {result.metric_type for result in data.eval_results} == {"loss", "perplexity"}
    assert data.eval_results[0].metric_value == pytest.approx(last["val_loss"], rel=1e-5)
    assert (data.eval_results[0].dataset_name, data.model_name) == ("toy", "tiny")
    assert (data.library_name, data.pipeline_tag, data.tags) == (
        "transformers",
        "text-generation",
        ["foretrain", "gpt2"],
    )
    assert (data.license, data.base_model, data.datasets) == (None, None, None)  # not known, so not said
    told = figures(found)
    assert told["Tokens seen"][0] == "5,760 (2.88 epochs)"  # 45 steps of 4 x 2 x 16 tokens, of 2,000
    assert "2,000 training tokens" in told["Data"][0]
    assert told["Hardware"][0] == "1 x RTX 4070"
    assert told["Time"][0].startswith("6")


def score(**changes: Any) -> TextScore:
    values = {"text": "toy/val", "sha256": "", "size_bytes": 9, "tokens": 9, "loss": 1.0, "bits_per_byte": 1.5,
              "standard_error": 0.25, "windows": 2, "context_tokens": 16, "stride_tokens": 8, "whole": False,
              "device": "cpu", "dtype": "float32", "at": ""}  # fmt: skip
    return TextScore.model_validate({**values, **changes})


def test_a_card_tells_what_eval_found(tmp_path: Path) -> None:
    """And says that nothing else was evaluated only where that is so."""
    path = write_measured_run(tmp_path / "run")
    run = RunDirectory(path)
    task = TaskScore(task="<b>", metric="acc", filter="none", value=0.5, standard_error=None, higher_is_better=True,
                     shots=2, documents=3, documents_in_all=10, version="1", harness="lm_eval 0.4", through="export",
                     device="cpu", dtype="float32", at="")  # fmt: skip
    texts = (score(), score(text="/srv/mine/notes|.txt", whole=True, standard_error=None))
    scores = Scores(checkpoint="step-60", step=60, weights_sha256="x", texts=texts, tasks=(task,))
    record, progress = run.read_record(), Progress(step=60, elapsed_s=6.0)
    text = card_of(facts_of(record, progress, run.read_lines("metrics"), True, scores))
    assert "1.5000 &#177; 0.2500 of the validation data, its first 9 tokens" in text
    assert "| 1.5000 of notes&#124;.txt | foretrain eval: windows of 16 tokens, one every 8, float32 |" in text
    assert "/srv/mine" not in text
    assert "&#60;b&#62;, acc: 0.5000 | lm_eval 0.4, 2-shot, 3 of 10 documents, float32 |" in text
    assert "No other evaluation" not in text
    assert "No other evaluation was made." in card_of(facts(path))


def test_an_export_has_the_scores_of_its_own_weights() -> None:
    train(tiny(max_iters=1))
    found = of_run(Path("out"), best=False)
    for weights, bits in ((found.weights_sha256, 1.25), ("of another run", 7.5)):
        scores = Scores(checkpoint="", step=int(bits), weights_sha256=weights, texts=(score(bits_per_byte=bits),))
        found.directory.keep_scores(scores)
    card = (Path(export("out").path) / "README.md").read_text("utf-8")
    assert "1.2500" in card
    assert "7.5000" not in card


def test_energy_is_measured_where_the_card_told_its_power(tmp_path: Path) -> None:
    path = write_measured_run(tmp_path / "run", price_per_kwh=0.5, co2_per_kwh=400)
    estimated = facts(path)
    assert "estimated" in figures(estimated)["Energy"][1]
    assert "board power" in figures(estimated)["Energy"][1]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    told = [{**line, "power_w": 180.0} if line["kind"] == "step" else line for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    found = facts(path, elapsed_s=3600.0)
    measured = figures(found)
    assert measured["Energy"][0] == "180 Wh"
    assert "measured" in measured["Energy"][1]
    assert measured["CO2"][0] == "72 g"
    assert measured["Cost"][0] == "0.09 EUR of electricity"
    said = read_back(card_of(found)).co2_eq_emissions
    assert (said["emissions"], said["training_type"]) == (72.0, "pre-training")  # grams
    assert said["hardware_used"] == "1 x RTX 4070"
    assert "measured energy" in said["source"]
    two = facts(path, elapsed_s=3600.0, world=2)  # readings are of the first card alone
    assert "estimated" in figures(two)["Energy"][1]
    assert "co2_eq_emissions" not in read_back(card_of(facts(write_measured_run(tmp_path / "b")))).to_dict()


def test_rent_is_the_hours_of_all_cards(tmp_path: Path) -> None:
    path = write_measured_run(tmp_path / "run", price_per_hour=2.0)
    assert figures(facts(path, elapsed_s=1800.0, world=2))["Cost"][0] == "2.00 EUR"


def test_names_that_mean_something_stay_names(tmp_path: Path) -> None:
    from markdown_it import MarkdownIt

    path = write_measured_run(tmp_path / "run", currency="<b>|`", co2_per_kwh=400)
    record = RunDirectory(path).read_record()
    dataset = record.dataset.model_copy(update={"name": HOSTILE, "tokenizer": HOSTILE})
    gpu = record.gpu.model_copy(update={"name": HOSTILE})
    found = facts(path, name=HOSTILE, dataset=dataset.model_dump(), gpu=gpu.model_dump())
    text = card_of(found)
    data = read_back(text)
    keys = {"library_name", "pipeline_tag", "tags", "model-index", "co2_eq_emissions"}
    assert set(data.to_dict()) == keys
    assert data.license is None
    assert data.eval_results[0].dataset_name.startswith("a --- license: mit --- | <script>")
    body = hub.ModelCard(text).text
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(body)
    inside = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in [*tokens, *inside]}.isdisjoint(
        {"html_block", "html_inline", "image", "link_open", "strong_open", "em_open", "code_inline", "hr"}
    )
    title = next(token for i, token in enumerate(tokens) if tokens[i - 1].type == "heading_open")
    assert "".join(child.content for child in title.children or ()).startswith(
        "a --- license: mit --- | <script>alert(1)"
    )
    cells = sum(token.type == "td_open" for token in tokens)
    assert cells == 3 * len(found.figures)
    assert not any(line.startswith(("---", "license")) for line in body.splitlines())


def test_config_keeps_its_fence_and_no_paths_of_the_machine(tmp_path: Path) -> None:
    path = write_measured_run(
        tmp_path / "run", out_dir="/srv/mine/secret", dataset="/srv/mine/data", init_from="./mine"
    )
    text = card_of(facts(path))
    assert "/srv/mine" not in text
    assert "./mine" not in text
    assert "learning_rate = 0.01" in text
    odd = facts(path).model_copy(update={"config": 'x = "```"\n# A heading'})
    assert "\n````toml\n" in card_of(odd)


def test_card_names_the_base_model_and_the_hub_data(tmp_path: Path) -> None:
    path = write_measured_run(tmp_path / "run", init_from="gpt2", co2_per_kwh=1.0)
    record = RunDirectory(path).read_record()
    remote = record.dataset.model_copy(update={"remote": "hf://datasets/owner/texts@main/data"})
    data = read_back(card_of(facts(path, dataset=remote.model_dump())))
    assert (data.base_model, data.datasets) == ("openai-community/gpt2", ["owner/texts"])
    assert data.co2_eq_emissions["training_type"] == "fine-tuning"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("my-gpt_2", "my-gpt_2"),
        ("_a_", "&#95;a&#95;"),
        ("", "&#45;"),
        ("a\tb\x1b[31m", "a b &#91;31m"),
        ("- x", "&#45; x"),
    ],
)
def test_plain_names_are_left_alone(name: str, shown: str) -> None:
    assert plain(name) == shown


# -- the upload ----------------------------------------------------------------------------------------------


class FakeHub(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, Any]]] = []
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        type(self).asked.append((self.path, lines))
        answer: dict[str, Any] = {}
        if self.path == "/api/repos/create":
            answer = {"url": "https://huggingface.co/me/mine", "name": "me/mine"}
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in lines[0]["files"]
            ]
            answer = {"files": files}
        elif self.path.endswith("/commit/main"):
            answer = {
                "commitUrl": "https://huggingface.co/me/mine/commit/1",
                "commitOid": "1" * 40,
                "pullRequestUrl": None,
            }
        self.answer(type(self).status, answer)

    def do_GET(self) -> None:
        type(self).asked.append((self.path, None))
        self.answer(404, {})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        text = json.dumps(value if status == 200 else {"error": "You may not write here."}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, own_directory: Path) -> Iterator[type[FakeHub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    FakeHub.asked, FakeHub.status = [], 200
    aim(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield FakeHub
    server.shutdown()
    server.server_close()


def aim(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let huggingface_hub, which has read its settings, ask this address, with a token."""
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)


def test_a_push_sends_the_files_of_the_export_and_no_others(fake_hub: type[FakeHub]) -> None:
    train(tiny(max_iters=2, eval_interval=2))
    Path("mine").mkdir()
    Path("mine/secret.txt").write_text("not for others")
    done = foretrain("export", "out", "--out", "mine", "--force", "--push", "me/mine", code=0)
    assert "/me/mine. A new repository is private" in done.stdout
    created = next(lines for path, lines in fake_hub.asked if path == "/api/repos/create")[0]
    assert (created["name"], created["organization"]) == ("mine", "me")
    assert created.get("private") is True or created.get("visibility") == "private"
    sent = next(lines for path, lines in fake_hub.asked if path == "/api/models/me/mine/commit/main")
    files = {
        each["value"]["path"]: base64.b64decode(each["value"]["content"]) for each in sent if each["key"] == "file"
    }
    assert set(files) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    for name, data in files.items():
        assert Path("mine", name).read_bytes() == data
    assert sent[0]["value"]["summary"] == "step-0000000002 of a foretrain run"


def failed_push(*words: str) -> str:
    done = foretrain("export", "out", *words, code=ExitCode.ENVIRONMENT)
    told = [line for line in done.stderr.splitlines() if "note:" not in line]
    assert len(told) == 1, told
    assert Path("out/export-hf/model.safetensors").is_file()
    assert "hf upload me/mine out/export-hf --private" in told[0]
    return told[0]


def test_a_push_that_is_refused_keeps_the_folder(fake_hub: type[FakeHub]) -> None:
    train(tiny(max_iters=1))
    fake_hub.status = 403
    assert "You may not write here" in failed_push("--push", "me/mine")
    assert not any("commit" in path for path, _ in fake_hub.asked)


def test_without_a_token_nothing_is_asked(fake_hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(max_iters=1))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "nothing was sent" in failed_push("--push", "me/mine")
    assert fake_hub.asked == []


def test_without_a_network_the_folder_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(max_iters=1))
    aim(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    assert "upload failed" in failed_push("--push", "me/mine")


def test_senseless_push_is_refused_before_anything_is_written() -> None:
    train(tiny(max_iters=1))
    for form, name, id in (
        ("gguf", "me/mine", "push_form"),
        ("hf", "mine", "push_name"),
        ("hf", "a/../b", "push_name"),
    ):
        with refused(f"usage.{id}"):
            export("out", form, push=name)  # type: ignore[arg-type]
    assert not list(Path("out").glob("export-*"))
