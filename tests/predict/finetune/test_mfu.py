"""MFU of a fine-tuning step against closed forms: what the model needs, however the step runs."""

from typing import Any

import pytest

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.time import StepWork, model_flops, timing
from foretrain.predict.timing import Timing

GPU = find_gpu("RTX 4090")
B, T = 2, 256
WAYS: list[dict[str, Any]] = [
    {}, {"gradient_checkpointing": True}, {"liger": True}, {"loop": "trl"}, {"attn": "eager"}, {"compile": True},
    {"loop": "trl", "packing": True}, {"unsloth": True, "gradient_checkpointing": True}, {"amp": "bf16"},
]  # fmt: skip


def facts(name: str) -> ModelFacts:
    found = find_source(name).facts
    assert found is not None
    return found


def tuned(**options: Any) -> FineTune:
    return FineTune.model_validate({"dtype": "bfloat16", "batch_size": B, "seq_len": T, **options})


def attention_flops(f: ModelFacts) -> int:
    """12·H·D·T a token and layer (PaLM, appendix B): two products forward, four backward, of the full square."""
    return 12 * f.n_layer * f.n_head * f.head_dim * T


def matrices(f: ModelFacts) -> dict[str, int]:
    """Elements of the matrices of a Llama's block."""
    heads, kv = f.n_head * f.head_dim, f.n_kv_head * f.head_dim
    return {
        "q": f.n_embd * heads, "k": f.n_embd * kv, "v": f.n_embd * kv, "o": heads * f.n_embd,
        "gate": f.n_embd * f.mlp_width, "up": f.n_embd * f.mlp_width, "down": f.mlp_width * f.n_embd,
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_full_training_needs_six_flops_a_parameter_and_token(way: dict[str, Any]) -> None:
    f = facts("llama-3.2-1b")
    N = f.n_layer * sum(matrices(f).values()) + f.vocab_size * f.n_embd
    assert model_flops(f, tuned(**way), GPU) == B * T * (6 * N + attention_flops(f))


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_adapters_need_no_gradient_of_a_frozen_weight(way: dict[str, Any], method: str) -> None:
    """Nothing flows back to the frozen embedding either, so that the first block's queries, keys and values need none."""
    f, r = facts("llama-3.2-1b"), 16
    own, first = matrices(f), ("q", "k", "v")
    heads, kv, C, F = f.n_head * f.head_dim, f.n_kv_head * f.head_dim, f.n_embd, f.mlp_width
    down = {"q": C, "k": C, "v": C, "o": heads, "gate": C, "up": C, "down": F}  # inputs, of lora_A
    up = {"q": heads, "k": kv, "v": kv, "o": C, "gate": F, "up": F, "down": C}  # outputs, of lora_B
    frozen = f.n_layer * sum(own.values()) + f.vocab_size * C
    trained = f.n_layer * r * (sum(down.values()) + sum(up.values()))
    unneeded = 2 * sum(own[name] + r * down[name] for name in first)
    expected = B * T * (4 * frozen + 6 * trained - unneeded + attention_flops(f))
    assert model_flops(f, tuned(method=method, lora_r=r, **way), GPU) == expected


def timed(**options: Any) -> Timing:
    found = timing(StepWork(facts("llama-3.2-1b"), tuned(**options), GPU))
    assert found is not None
    return found


def test_recomputation_counts_for_hfu_alone() -> None:
    plain, again = timed(), timed(gradient_checkpointing=True)
    assert plain.flops_per_step == again.flops_per_step
    f = facts("llama-3.2-1b")
    # A block's forward pass runs twice, but for the last product, which backward has no need of.
    forward = (
        B * T * f.n_layer * (2 * (sum(matrices(f).values()) - matrices(f)["down"]) + 4 * f.n_head * f.head_dim * T)
    )
    assert again.hardware_flops_per_step - plain.hardware_flops_per_step == forward
    assert again.hfu / again.mfu == pytest.approx(again.hardware_flops_per_step / again.flops_per_step)
    assert again.mfu == pytest.approx(again.flops_per_step / again.step_s.expected_s / 165.2e12, rel=0.001)


def test_more_micro_batches_need_as_much_each() -> None:
    assert timed(grad_accum=3).flops_per_step == 3 * timed().flops_per_step
