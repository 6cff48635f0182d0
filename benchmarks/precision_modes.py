"""The opt-in precision modes side by side on this CPU: same weights, data and steps, only the arithmetic differs.

    python benchmarks/precision_modes.py      (about two minutes)

A small GPT on the Python standard library's source as bytes. Each run's loss is that of the same held-out batches, with
the arithmetic it trained with. Gradients are compared with bfloat16's on the weights before the first step and
after the last. Two seeds of bfloat16 show what differs between runs anyway. Speed is not the point: a CPU has no FP8
units, and this says nothing of a GPU.
"""

import os
import tempfile
import time
from typing import Any

import torch
from common import arguments, report

from foretrain.config.options import RunConfig
from foretrain.data.batches import TokenFile, evaluation_batches
from foretrain.data.builtin import prepare_built_in
from foretrain.model.low_precision import layers
from foretrain.model.precision_check import compare
from foretrain.model.step import TrainState, build, evaluation_loss, learning_rate, train_step
from tests.kit.batches import train_batches

CPU = torch.device("cpu")
STEPS = 200
BASE: dict[str, Any] = {
    "n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 256, "batch_size": 8,
    "gradient_accumulation_steps": 1, "learning_rate": 2e-3, "min_lr": 2e-4, "max_iters": STEPS, "lr_decay_iters": STEPS,
    "warmup_iters": 20, "dataset": "python-stdlib", "tokenizer": "byte", "device": "cpu", "compile": False,
}  # fmt: skip
# (name, dtype, options, all three matmuls in INT8)
RUNS: list[tuple[str, torch.dtype, dict[str, Any], bool]] = [
    ("float32", torch.float32, {}, False),
    ("bfloat16", torch.bfloat16, {}, False),
    ("bfloat16, another seed", torch.bfloat16, {"seed": 1338}, False),
    ("fp8", torch.bfloat16, {"matmul": "fp8"}, False),
    ("int8 (weight gradient bfloat16)", torch.bfloat16, {"matmul": "int8"}, False),
    ("int8, all three products", torch.bfloat16, {"matmul": "int8"}, True),
    ("adamw8bit", torch.bfloat16, {"optimizer": "adamw8bit"}, False),
]


def agreement(state: TrainState, tokens: TokenFile) -> dict[str, float] | None:
    """Compare the run's arithmetic with bfloat16's, on its own weights; None where they are the same."""
    if not layers(state.model):
        return None
    c = state.config
    batches = evaluation_batches(
        tokens, 0, "train", rows=4 * c.batch_size, batch_size=c.batch_size, block=c.block_size, device=CPU
    )  # fmt: skip
    found = compare(state, batches, "bfloat16")
    return {key: getattr(found, key) for key in ("loss", "plain_loss", "cosine", "worst_cosine")}


def run(name: str, dtype: torch.dtype, settings: dict[str, Any], all_three: bool) -> dict[str, Any]:
    config = RunConfig.model_validate({**BASE, **settings})
    info = prepare_built_in(config)
    files = {split: TokenFile(info, split, config.vocab_size) for split in ("train", "val")}
    state = build(config, CPU, dtype, compile=False)
    for _, layer in layers(state.model):
        layer.all_three = all_three
    before = agreement(state, files["train"])
    start, losses = time.perf_counter(), []
    for step in range(STEPS):
        batches = train_batches(
            files["train"], config.seed, step, batch_size=config.batch_size, accumulation=1, block=config.block_size, device=CPU
        )  # fmt: skip
        losses.append(float(train_step(state, batches, learning_rate(config, step)).loss))
    took_s = time.perf_counter() - start
    after = agreement(state, files["train"])
    held_out = evaluation_batches(
        files["val"], 0, "val", rows=24 * config.batch_size, batch_size=config.batch_size, block=config.block_size,
        device=CPU,
    )  # fmt: skip
    val = [float(evaluation_loss(state, batch)) for batch in held_out]
    return {
        "run": name, "dtype": str(dtype)[6:], "knobs": settings, "val_loss": sum(val) / len(val),
        "train_loss_of_last_20": sum(losses[-20:]) / 20, "first_loss": losses[0], "took_s": round(took_s, 1),
        "agreement_before": before, "agreement_after": after,
    }  # fmt: skip


def main() -> None:
    options = arguments("precision_modes", __doc__ or "")
    options.out = options.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = [run(*each) for each in RUNS]
    report(options.out, {"threads": torch.get_num_threads(), "steps": STEPS, "knobs": BASE, "runs": found})


if __name__ == "__main__":
    main()
