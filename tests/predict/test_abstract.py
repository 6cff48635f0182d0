"""The estimate of eager memory: the model's own code on tensors without values."""

import random
import subprocess
import sys
from typing import Any

import pytest

from foretrain.config.checks import check
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.predict.abstract import passage, step
from foretrain.predict.abstract.dims import Dim, factors
from foretrain.predict.estimate.simulated_run import SimulatedRun
from foretrain.predict.spec import StepSpec


def drawn(draw: random.Random) -> tuple[RunConfig, str, str, str]:
    while True:
        heads = draw.choice([1, 2, 3, 4])
        recipe = draw.choice(["nanogpt", "nanogpt", "modern", "llama", "nanochat"])
        modern = recipe != "nanogpt"
        values: dict[str, Any] = {
            "n_layer": draw.choice([1, 2, 5, 7]), "n_head": heads, "n_embd": heads * draw.choice([32, 50, 64, 80, 128]),
            "block_size": draw.choice([97, 128, 256]), "batch_size": draw.choice([1, 3, 8]), "compile": False,
            "gradient_accumulation_steps": draw.choice([1, 2, 4]), "vocab_size": draw.choice([128, 256, 1013, 5000]),
            "recipe": recipe, "activation_checkpointing": draw.random() < 0.3,
            "dropout": 0.0 if modern else draw.choice([0.0, 0.1]), "bias": not modern and draw.random() < 0.3,
            "loss_chunk_size": draw.choice([0, 0, 64, 100]) if recipe != "nanochat" else 0, "recompute_norm_gelu": not modern and draw.random() < 0.3,
            "eval_batch_size": draw.choice([1, 2, 3]), "eval_block_size": 64,
        }  # fmt: skip
        if recipe == "llama":
            values |= {
                "n_kv_head": draw.choice([0, 1, heads]), "head_dim": draw.choice([0, 32, 40]),
                "mlp_width": draw.choice([0, 192]), "qk_norm": draw.random() < 0.5,
                "tied_embeddings": draw.random() < 0.5,
            }  # fmt: skip
        dtype = draw.choice(["float32", "bfloat16", "float16"])
        if dtype != "float32" and draw.random() < 0.2:
            values["master_weights"] = True
        config, problems = check(values, {})
        if config is not None and not problems:
            how = "foretrain" if modern else draw.choice(["foretrain", "nanogpt"])
            return config, dtype, how, draw.choice(["RTX 4070", "Tesla T4", "H100 SXM", "cpu"])


def events_of(config: RunConfig, dtype: str, how: str, card: str) -> tuple[Any, ...]:
    run = SimulatedRun(
        StepSpec.of(config, cpu_device() if card == "cpu" else find(card), how, dtype=dtype, compiled=False)
    )  # type: ignore[arg-type]
    peaks = {phase: (peak.nbytes, peak.moment) for phase, peak in run.peaks().items()}
    return run.t.events, run.t.sizes, peaks, run.saved_bytes


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_structures", {})
    monkeypatch.setattr(step, "_recorders", {})


def test_a_pass_of_some_layers_unrolled_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    cases = [drawn(draw) for _ in range(40)]
    assert {config.n_layer for config, *_ in cases} > {5, 7}
    forget(monkeypatch)
    monkeypatch.setattr(step.EagerProgram, "_uneven", lambda self: pytest.fail("layers of a kind differ"))
    unrolled = [events_of(*case) for case in cases]
    forget(monkeypatch)
    monkeypatch.setattr(step, "MOST", 99)
    assert passage.MOST < 5
    for case, found in zip(cases, unrolled, strict=True):
        forget(monkeypatch)
        assert events_of(*case) == found, case


def test_remembered_pass_is_the_one_that_would_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs that differ in sizes alone, some of whose passes are the same."""
    draw = random.Random(2)
    remembered: dict[Any, Any] = {}
    recorders: dict[Any, Any] = {}
    used = 0
    for _ in range(60):
        config, dtype, how, card = drawn(draw)
        for _ in range(3):
            sizes = {
                "batch_size": draw.choice([1, 2, 5, 8]), "vocab_size": draw.choice([257, 999, 4096]),
                "n_embd": config.n_head * draw.choice([32, 64, 50]), "gradient_accumulation_steps": draw.choice([1, 3]),
            }  # fmt: skip
            other, problems = check({**config.model_dump(exclude_unset=True), **sizes}, {})
            if other is None or problems:
                continue
            before = len(remembered)
            monkeypatch.setattr(step, "_structures", remembered)
            monkeypatch.setattr(step, "_recorders", recorders)
            found = events_of(other, dtype, how, card)
            used += len(remembered) == before
            forget(monkeypatch)
            assert events_of(other, dtype, how, card) == found, (other, dtype, how, card)
    assert used > 40


def test_models_run_without_torch() -> None:
    code = (
        "import sys\nfrom foretrain.predict.abstract import programs\n"
        "found = programs.load('foretrain.model.gpt2'), programs.load('foretrain.model.modern')\n"
        "assert found[0].GPT and found[1].ModernGPT and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_torch_knows_and_the_estimate_does_not_is_named() -> None:
    torch = step.programs.EAGER.torch
    with pytest.raises(NotImplementedError, match=r"torch\.linalg_something is not known"):
        torch.linalg_something(1)


def test_sizes_of_heads_are_merged_where_that_is_right() -> None:
    """All heads together are the width, but where a family gives heads another one; groups of keys are all heads."""
    H, D, K, T = (Dim(n, 1, (letter,)) for n, letter in ((6, "H"), (32, "D"), (2, "K"), (16, "T")))
    assert (H // K, getattr(H // K, "letters", ())) == (3, ("G",))
    assert factors(2, (T, H, D)) == (2, "T", "C")
    assert factors(2, (T, H, D), together=False) == (2, "T", "H", "D")
    assert factors(2, (T, K, D)) == (2, "T", "K", "D")
    assert factors(2, (T, K, H // K, D)) == (2, "T", "C")
    assert factors(2, (T, K, H // K, Dim(32, 1, ("E",))), together=False) == (2, "T", "A")
