"""`eval_only`, as in nanoGPT's config/eval_gpt2*.py: batches, seconds and memory, and nothing of steps."""

import json
from pathlib import Path

import pytest

from foretrain.config.resolve import from_text
from foretrain.web import calls
from tests.kit.command import foretrain

# karpathy/nanoGPT config/eval_gpt2.py
EVAL_GPT2 = "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2'\n"


@pytest.fixture
def config(own_directory: Path) -> str:
    path = own_directory / "eval_gpt2.py"
    path.write_text(EVAL_GPT2)
    return str(path)


def test_batches_seconds_and_memory(config: str) -> None:
    result = foretrain("plan", config, "--gpu", "4070", "--full")
    shown = " ".join(result.stdout.split())
    assert "1,000 batches of 8 x 1,024 tokens" in shown
    assert "fits" in shown
    for nonsense in ("0.00e0", "all 0 steps", "FLOPs", "tokens/s", "MFU", "epochs", "checkpoint"):
        assert nonsense not in shown, nonsense
    short = foretrain("plan", config, "--gpu", "4070").stdout
    assert "0 steps" not in short
    assert "FLOPs" not in short
    made = json.loads(foretrain("plan", config, "--gpu", "4070", "--json").stdout)
    evaluation = made["nanogpt_timing"]["evaluation_s"]["expected_s"]
    assert 20 < evaluation < made["nanogpt_timing"]["total_s"]["expected_s"] < 200
    assert [phase["phase"] for phase in made["memory"][0]["phases"]] == ["evaluate_first"]


def test_foretrains_batches_are_its_own() -> None:
    found = from_text(EVAL_GPT2 + "eval_batch_size = 16\n", "eval_gpt2.py").config
    asked = {
        "values": {name: getattr(found, name) for name in ("eval_iters", "eval_only", "batch_size", "eval_batch_size")}
    }
    status, answer = calls.POSTED["/api/plan"](json.dumps({**asked, "gpu": "RTX 4070"}))
    assert status == 200
    assert "500 batches of 16 x 1,024 tokens" in json.dumps(answer, ensure_ascii=False)
    assert not {"step", "speed", "mfu"} & {figure["id"] for figure in answer["figures"]}
