"""`foretrain plan … --write-script`: the script runs, with the settings that were planned."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.app.training_script import VERSIONS
from tests.kit.command import REPO, foretrain

WORDS = [f"w{i}" for i in range(100)]
KEPT = ("batch_size", "grad_accum", "optim", "method", "lora_r", "gradient_checkpointing", "dtype", "amp", "training")


SLOW = [
    ("--method=lora", "--grad-accum=2"),
    ("--method=full", "--training=classification", "--labels=2", "--batch-size=2"),
    ("--method=lora", "--loop=trl", "--packing"),
    ("--method=full", "--training=simpo"),
    ("--method=lora", "--training=kto"),
]


def write(name: str, *words: str, code: int | None = 0, says: str = "") -> str:
    foretrain("plan", *words, "--gpu", "4090", "--write-script", name, "--quiet", code=code, says=says)
    return Path(name).read_text("utf-8") if Path(name).exists() else ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen3 of random weights and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<end>", *WORDS])}, unk_token="<end>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<end>", unk_token="<end>")
    made.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    return folder


def sample(number: int, training: str) -> dict[str, object]:
    texts = [" ".join(WORDS[(number + part + 3 * i) % 100] for i in range(12)) for part in range(3)]
    if training in ("dpo", "simpo"):
        return dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
    if training == "kto":
        return {"prompt": texts[0], "completion": texts[1], "label": number % 2 == 0}
    return {"text": " ".join(texts), "label": number % 2}


@pytest.mark.parametrize(
    "words",
    [
        ("--method=qlora", "--amp=no", "--gradient-checkpointing", "--evaluate", "--eval-batches=1"),
        ("--method=lora", "--training=dpo"),
        *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW),
    ],
    ids=lambda words: "-".join(word.removeprefix("--") for word in words[:2]),
)
def test_written_script_runs_as_it_was_planned(
    words: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = next((word.removeprefix("--training=") for word in words if "--training" in word), "sft")
    Path("data.jsonl").write_text("\n".join(json.dumps(sample(i, training)) for i in range(32)))
    write("go.py", str(model), *words, "--seq-len", "16")
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "go.py", "data.jsonl", "--max-steps"]
    resumed = training == "dpo"  # the second process goes on from the checkpoint of the first
    for steps in ("2", "3") if resumed else ("3",):
        done = subprocess.run([*command, steps], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    state = json.loads(Path("go-output/checkpoint-3/trainer_state.json").read_text())
    assert state["global_step"] == 3
    planned = foretrain("plan", str(model), *words, "--seq-len", "16", "--gpu", "4090", "--json", code=0)
    tune = json.loads(planned.stdout)["tune"]
    ran = json.loads(Path("go-output/foretrain/plan.json").read_text())["tune"]
    assert {name: ran[name] for name in KEPT} == {name: tune[name] for name in KEPT}


@pytest.mark.slow
def test_script_of_grpo_takes_rewards_from_a_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": " ".join(WORDS[i : i + 6 + 20 * (i == 3)])} for i in range(16)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    Path("score.py").write_text("def reward_length(completions, **other):\n    return [1.0 for _ in completions]\n")
    lengths = ("--seq-len=16", "--completion-len=8", "--num-generations=2", "--batch-size=2")
    write("go.py", str(model), "--method=lora", "--training=grpo", *lengths)
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "go.py", "data.jsonl", "score.py", "--max-steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rewards/reward_length/mean" in done.stdout + done.stderr


TRAININGS = ("sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "classification", "grpo", "rloo")


@pytest.mark.parametrize("training", TRAININGS)
def test_script_is_python_that_sets_what_was_planned(
    training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for method, evaluate in (("full", "--evaluate"), ("qlora", "--no-evaluate")):
        if method == "qlora" and training in ("orpo", "cpo", "simpo"):
            continue  # a bound alone
        name = f"{method}{evaluate}.py"
        short = ()
        if training in ("grpo", "rloo"):
            evaluate, short = "--no-evaluate", ("--completion-len=128",)  # an evaluation is refused
        words = ("--training", training, "--method", method, evaluate, "--batch-size=2", "--seq-len=256")
        text = write(name, "qwen3-0.6b", *words, *short)
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        named = [word for call in calls for word in call.keywords]
        given = {word.arg: word.value.value for word in named if isinstance(word.value, ast.Constant)}
        assert given["per_device_train_batch_size"] == 2
        assert given["bf16"] == (method == "qlora")
        assert ("r" in given) == (method != "full")
        assert ("load_in_4bit" in given) == (method == "qlora")
        assert ("eval_dataset" in text) == (evaluate == "--evaluate")
        assert max(map(len, text.splitlines()[:1] + text.splitlines()[12:])) <= 120


def test_script_of_several_cards_is_started_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--method=qlora", "--gpus", "2 x RTX 4090", "--write-script", "go.py", "--quiet")
    foretrain("plan", "qwen3-0.6b", *words, code=0)
    text = Path("go.py").read_text()
    assert "torchrun --nproc-per-node 2 go.py" in text
    assert 'device_map={"": int(os.environ["LOCAL_RANK"])}' in text


def test_script_of_a_folder_with_quotes_is_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("it's a \"model\\")
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    tree = ast.parse(write("go.py", str(folder), "--method=lora"))
    assert str(folder) in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_script_is_refused_where_it_would_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lora = ("qwen3-0.6b", "--method=lora")
    write("go.txt", *lora, code=2, says="ends in .py")
    write("trl.py", *lora, code=2, says="trl.py")
    write("go.py", *lora, "--loop=unsloth", code=2, says="--loop unsloth")
    write("go.py", *lora, "--training=ppo", code=2, says="--training ppo")
    write("go.py", *lora, "--training=grpo", "--evaluate", code=2, says="--evaluate and --training grpo")
    write("go.py", "llama-3.1-8b", "--method=full", code=2, says="foretrain advise llama-3.1-8b")
    foretrain("plan", "gpt2", "--write-script", "go.py", code=2, says="foretrain train gpt2")
    foretrain("plan", "qwen3-0.6b", "--inference", "--write-script", "go.py", code=2, says="--write-script")
    assert not list(tmp_path.iterdir())
    text = write("go.py", *lora)
    write("go.py", *lora, code=2, says="go.py")
    assert Path("go.py").read_text() == text


def test_versions_are_those_that_plans_are_compared_with() -> None:
    pins = dict(line.split("==") for line in (REPO / "constraints.txt").read_text().split() if "==" in line)
    assert {name: pins[name] for name in VERSIONS} == VERSIONS
