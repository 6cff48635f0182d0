"""docs/schemas: what `--json` really prints is what the schemas say, and every verb's output has one."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command import REPO, foretrain
from tests.kit.evaluation import trained
from tests.kit.tiny import write_dataset

jsonschema = pytest.importorskip("jsonschema")
sys.path.insert(0, str(REPO / "docs"))
import json_schemas  # noqa: E402

CASES = REPO / "examples" / "real-cases"
CARD = ("--gpu", "RTX 4070")
# Schemas of files that foretrain writes and reads itself, and of the page's own answers.
FILES = {
    "foretrain.dataset/1", "foretrain.prepare-state/1", "foretrain.nonfinite/1", "foretrain.scores/1",
    "foretrain.trace/1", "foretrain.checkpoint/1", "foretrain.page/1", "foretrain.now/1",
    "foretrain.label/1",
}  # fmt: skip
TRAIN = (
    "train", "baby", "--device=cpu", "--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=2",
    "--max_iters=4", "--lr_decay_iters=4", "--warmup_iters=1", "--eval_interval=2", "--eval_iters=1", "--out_dir=run",
)  # fmt: skip


def held(name: str, text: str) -> dict[str, Any]:
    """The object of a text, held to the committed schema of its name."""
    found = json.loads(text)
    assert found["schema"] == name
    schema = json.loads(json_schemas.path_of(name).read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def asked(name: str, *words: str, code: int = 0) -> dict[str, Any]:
    result = foretrain(*words, "--json", timeout=3600, code=code)
    return held(name, result.stdout)


ANSWERS = {
    "foretrain.plan/1": ("plan", str(CASES / "c.py"), *CARD, "--used-by-others", "2.1GB"),
    "foretrain.plan/1#plans": ("plan", "gpt2-124m", "--gpu", "3060,4070"),
    "foretrain.plan/1#within": ("plan", "gpt2-124m", *CARD, "--within", "12h"),
    "foretrain.plan/1#config": ("plan", "baby", "--show-config"),
    "foretrain.advice/1": ("advise", str(CASES / "c.py"), *CARD, "--used-by-others", "2.1GB"),
    "foretrain.mfu/1": ("mfu", str(CASES / "b1.py"), "--tokens-per-s", "134k", *CARD),
    "foretrain.compare/1": (
        "compare", f"B1={CASES}/b1.log+{CASES}/b1.py", f"B2={CASES}/b2.csv+{CASES}/b2.py", *CARD,
    ),
    "foretrain.explain/1#log": (
        "explain", str(REPO / "examples/logs/c-out-of-memory.log"), "--config", str(CASES / "c.py"), *CARD,
    ),
    "foretrain.explain/1#snapshot": ("explain", str(REPO / "examples/snapshots/fragmented.pickle")),
    "foretrain.verify/1": (
        "verify", "--show", str(REPO / "tests" / "data" / "verify_on_a_card_that_computes_nothing.json"),
    ),
    "foretrain.gpus/1": ("gpus",),
    "foretrain.gpus/1#doctor": ("doctor",),
    "foretrain.languages/1": ("languages",),
    "foretrain.run/1#top": ("top",),
}  # fmt: skip
SLOW = {
    "foretrain.plan/1#best": ("plan", *CARD, "--best", "--within", "20h", "--data-tokens", "3.68B"),
    "foretrain.plan/1#explanation": ("plan", "gpt2-30m", *CARD, "--explain", "--n_layer=2", "--compile=false"),
    "foretrain.plan/1#largest": (
        "plan",
        "gpt2-30m",
        *CARD,
        "--largest",
        "batch_size",
        "--n_layer=2",
        "--compile=false",
    ),
    "foretrain.calibration/1": ("calibrate", "--quick"),
    "foretrain.demo/1": ("demo", "--steps", "20"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_what_their_schema_says(name: str) -> None:
    asked(name, *ANSWERS[name])


KINDS = {
    "a fine-tuning run": ("plan", "foretrain.plan/1", "smollm2-135m", "--method", "lora", *CARD),
    "one that does not fit": ("plan", "foretrain.plan/1", "qwen3-8b", "--method", "full", *CARD),
    "one on cards": ("plan", "foretrain.plan/1#plans", "smollm2-135m", "--seq-len", "512", "--gpu", "3060,4070"),
    "a limit on cards": (
        "plan", "foretrain.plan/1#plans", "smollm2-135m", "--packing", "--gpu", "3060,4070", "--within", "3kWh",
    ),
    "one explained": ("plan", "foretrain.plan/1#explanation", "smollm2-135m", *CARD, "--method", "lora", "--explain"),
    "its options": ("plan", "foretrain.plan/1#config", "smollm2-135m", *CARD, "--method", "lora", "--show-config"),
    "several cards": ("plan", "foretrain.plan/1", "gpt2-124m", "--gpus", "2 x 3060"),
    "text": ("plan", "foretrain.plan/1", "llama-3.1-8b", "--inference", "--weights", "q4_k_m", *CARD),
    "text on cards": (
        "plan", "foretrain.plan/1#plans", "llama-3.1-8b", "--inference", "--weights", "q4_k_m", "--gpu", "3060,4070",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", KINDS)
def test_a_schema_holds_for_every_kind_of_run(what: str) -> None:
    command, name, *words = KINDS[what]
    asked(name, command, *words)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_answers_are_what_their_schema_says(name: str) -> None:
    asked(name, *SLOW[name])


def test_a_log_that_only_ended_is_one_too() -> None:
    log = (REPO / "examples/logs/c-out-of-memory.log").read_text("utf-8").splitlines()
    Path("end.log").write_text(log[-1] + "\n", "utf-8")
    assert "out_of_memory" in asked("foretrain.explain/1#log", "explain", "end.log")


def test_the_steps_that_fit_are_one_schema_of_every_kind_of_run() -> None:
    words = ("plan", "smollm2-135m", *CARD, "--method", "lora", "--within", "2h", "--largest", "batch_size")
    assert asked("foretrain.plan/1#within", *words)["largest"]["value"]
    assert asked("foretrain.plan/1#within", "plan", "gpt2-124m", "--gpus", "2 x 3060", "--tokens", "1M")["plan"][
        "ranks"
    ]


def test_errors() -> None:
    found = asked("foretrain.error/1", "plan", "gpt2-124m", "--gpu", "RTX 4071", code=2)
    assert found["id"].startswith("gpu.unknown_name")
    asked("foretrain.error/1", "plan", "gpt2-124m", *CARD, "--n_layer=-1", "--n_head=0", code=2)
    asked("foretrain.error/1", "gpus", "--no-such", code=2)


def test_a_run_and_what_is_said_of_it(own_directory: Path) -> None:
    write_dataset(own_directory / "data" / "toy")
    words = ("--dataset=toy", "--vocab_size=96")
    asked("foretrain.run/1", *TRAIN, *words)
    asked("foretrain.compare/1#forecast", "compare", "run")
    asked("foretrain.explain/1", "explain", "run")
    asked("foretrain.report/1", "report", "run")
    assert asked("foretrain.run/1#runs", "runs")["runs"]
    assert asked("foretrain.run/1#top", "top", "run")["runs"]
    asked("foretrain.model/1#export", "export", "run", "--to", "safetensors")


def test_an_evaluation_and_where_it_is_shown() -> None:
    trained("modern")
    assert asked("foretrain.model/1#eval", "eval", "out", "--device=cpu")["texts"]
    assert asked("foretrain.explain/1", "explain", "out")["scores"]


def test_datasets() -> None:
    Path("text.txt").write_text("Reading and writing.\n" * 400, "utf-8")
    words = (
        "prepare",
        "text.txt",
        "--out",
        "data/a",
        "--tokenizer",
        "byte",
        "--split-documents",
        "line",
        "--val",
        "10%",
    )
    asked("foretrain.data/1#plan", *words, "--plan")
    asked("foretrain.data/1#prepared", *words)
    asked("foretrain.data/1#info", "data", "info", "data/a")
    asked("foretrain.data/1#verify", "data", "verify", "data/a")
    asked("foretrain.data/1#head", "data", "head", "data/a")
    asked("foretrain.data/1#mix", "data", "mix", "data/a=1", "--out", "mix.toml")


@pytest.mark.slow
def test_answers_of_watch_and_export_have_schemas() -> None:
    asked("foretrain.run/1", "watch", "--json", "--", sys.executable, "-c", "print(1)")
    assert foretrain(*TRAIN, timeout=300).returncode == 0
    asked("foretrain.model/1#sample", "sample", "run", "--tokens", "5")
    asked("foretrain.tune/1", *("tune", *TRAIN[1:]), "--budget", "1h", "--trials", "2")


def test_the_schemas_refuse_what_is_not_theirs() -> None:
    text = foretrain(*ANSWERS["foretrain.mfu/1"], "--json").stdout
    for change in ({"step_s": "3.9"}, {"unknown_key": 1}, {"schema": "foretrain.mfu/2"}):
        with pytest.raises((jsonschema.ValidationError, AssertionError)):
            held("foretrain.mfu/1", json.dumps({**json.loads(text), **change}))
    with pytest.raises(jsonschema.ValidationError):
        held("foretrain.mfu/1", json.dumps({k: v for k, v in json.loads(text).items() if k != "tokens_per_s"}))


def test_every_output_has_a_schema() -> None:
    """Every name of a schema in the code is one of the page's, or of a file that users need not read."""
    found = set()
    for path in (REPO / "foretrain").rglob("*.py"):
        found |= set(re.findall(r'"(foretrain\.[a-z-]+/\d+(?:#[a-z-]+)?)"', path.read_text("utf-8")))
    assert found - FILES == set(json_schemas.OUTPUTS)
    committed = {path.name for path in json_schemas.FOLDER.glob("*.json")}
    assert committed == {json_schemas.path_of(name).name for name in json_schemas.OUTPUTS}
    assert len(committed) <= 16


def test_the_name_of_an_answer_is_the_address_of_its_schema() -> None:
    for name in json_schemas.OUTPUTS:
        file = json.loads(json_schemas.path_of(name).read_text("utf-8"))
        answers = [file, *file.get("$defs", {}).values()]
        (found,) = [each for each in answers if each.get("properties", {}).get("schema") == {"const": name}]
        assert found.get("$anchor", "") == name.partition("#")[2]
