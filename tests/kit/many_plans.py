"""Forty unlike plans of every kind of run, made by so many threads; run as a script it prints them as JSON."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import foretrain

RECIPES = ("nanogpt", "modern", "llama", "nanochat")
DTYPES: tuple[Any, ...] = ("bfloat16", "float32", "float16")


def pretraining(n: int) -> foretrain.Plan:
    recipe = RECIPES[n % 4]
    own: dict[str, Any] = {"bias": n % 8 == 0, "dropout": 0.1 * (n % 8 == 4)} if recipe == "nanogpt" else {}
    return foretrain.plan(
        "baby", gpu="RTX 4070", n_layer=2 + n % 4, n_head=2, n_embd=64 * (1 + n % 5), vocab_size=256 + 64 * n,
        block_size=64, batch_size=4, recipe=recipe, compile=n % 3 != 0, dtype=DTYPES[n % 3], **own,
    )  # fmt: skip


def finetuning(n: int) -> foretrain.FineTunePlan:
    return foretrain.plan(
        ("smollm2-135m", "qwen2.5-0.5b")[n % 2], method=("lora", "qlora", "full")[n % 3], gpu="RTX 4090",
        batch_size=1 + n, seq_len=128 * (1 + n),
    )  # fmt: skip


def cards(n: int) -> foretrain.ClusterPlan:
    return foretrain.plan(
        "baby", gpus=f"{2 + n} x RTX 3090", n_layer=2 + n, n_head=2, n_embd=64, block_size=64, batch_size=2 + n,
        gradient_accumulation_steps=2 + n, compile=n % 2 == 0,
    )  # fmt: skip


def inference(n: int) -> foretrain.InferencePlan:
    name, weights = ("smollm2-135m", "qwen3-0.6b")[n % 2], ("bf16", "q4_0", "int8")[n % 3]
    return foretrain.plan(name, gpu="RTX 3060", weights=weights, inference=True)


KINDS = ((pretraining, 24), (finetuning, 6), (cards, 4), (inference, 6))
ASKED = [(kind, n) for kind, count in KINDS for n in range(count)]


def answer(number: int) -> Any:
    """The plan as JSON, and the screen that it prints as (of fine-tuning that takes seconds); or the error."""
    kind, n = ASKED[number]
    try:
        made: Any = kind(n)
        return made.to_json(), "" if kind is finetuning else str(made)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    threads = int(sys.argv[1])
    if threads > 1:
        sys.setswitchinterval(1e-5)  # threads take turns five hundred times as often as they usually do
    with ThreadPoolExecutor(threads) as pool:
        json.dump(list(pool.map(answer, range(len(ASKED)))), sys.stdout, sort_keys=True)
