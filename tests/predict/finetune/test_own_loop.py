"""Loops that are written by hand: they hold what the model gave until the next micro-batch ran."""

import json
from typing import Any

import pytest

from foretrain.config.finetune.options import FineTune
from tests.kit.command import foretrain

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

from tests.kit import finetune_proof as proof
from tests.kit.finetune import small
from tests.kit.finetune_traces import CONFIGS, agree_in_all_phases

# peft asks for names that transformers 5.23 calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]


@pytest.mark.parametrize("changes", [
    {"method": "full"}, {"method": "lora", "gradient_checkpointing": True}, {"method": "lora", "amp": "bf16"},
], ids=["full", "checkpointing", "autocast"])  # fmt: skip
def test_the_estimate_is_the_trace_of_a_loop_that_holds_outputs(changes: dict[str, Any]) -> None:
    # At the end of training the graph of `outputs` still has an embedding, which counts in small models only.
    phases = ("load", "first_step", "steady_step", "evaluate", "save")
    agree_in_all_phases(CONFIGS["qwen2"], only=phases, loop="own", **changes)


def test_estimate_holds_for_padding_accumulation_and_models() -> None:
    agree_in_all_phases(CONFIGS["gemma3, short window"], loop="own", grad_accum=3, padded=True)
    agree_in_all_phases(CONFIGS["gpt2"], loop="own", dtype="float32", amp="bf16")


def test_the_trace_of_such_a_loop_takes_what_the_real_one_does() -> None:
    tune = FineTune(seq_len=64, batch_size=2, lora_r=8, optim="adamw_torch", loop="own", dtype="bfloat16")
    truth = proof.compare(small("qwen3-0.6b"), tune)
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)
    beside = proof.compare(small("qwen3-0.6b"), tune.model_copy(update={"loop": "trainer"}))
    assert truth.real_bytes > beside.real_bytes


# An RTX 4080's allocated peaks in GiB, of DaoyuanLi2816/can-i-finetune-this@053ce9e (benchmarks/results), whose runner
# holds `outputs`: model, method, sequences, tokens of each, whether it checkpoints.
MEASURED = [
    ("qwen2.5-0.5b", "lora", 1, 1024, True, 3.032), ("qwen2.5-0.5b", "qlora", 1, 1024, True, 3.116),
    ("qwen2.5-1.5b", "qlora", 2, 1024, True, 6.531), ("qwen2.5-1.5b", "qlora", 1, 1024, False, 9.341),
    ("qwen2.5-1.5b", "qlora", 1, 4096, True, 11.507), ("qwen2.5-7b", "qlora", 1, 1024, True, 10.002),
]  # fmt: skip


@pytest.mark.parametrize(("model", "method", "batch", "tokens", "checkpoints", "measured"), MEASURED)
def test_peaks_measured_in_such_a_loop(
    model: str, method: str, batch: int, tokens: int, checkpoints: bool, measured: float
) -> None:
    words = ["plan", model, "--method", method, "--amp", "no", "--dtype", "bf16", "--seq-len", str(tokens)]
    words += ["--batch-size", str(batch), "--lora-r", "16", "--lora-targets", "q_proj,k_proj,v_proj,o_proj"]
    words += ["--optim", "paged_adamw_8bit", "--loop", "own", "--gpu", "RTX 4080", "--json"]
    result = foretrain(*words, f"--gradient-checkpointing={checkpoints}".lower())
    assert result.returncode == 0, result.stderr
    phases = {each["phase"]: each["allocated_bytes"] for each in json.loads(result.stdout)["memory"]["phases"]}
    assert phases["steady_step"] / 2**30 == pytest.approx(measured, rel=0.003)
