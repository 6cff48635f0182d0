"""Blocks that are compiled one by one on one card: the estimate against Inductor's own code on fake tensors."""

import subprocess
import sys
from typing import Any

import pytest

from foretrain.config.shape import ModelShape
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from tests.kit.techniques import GPU, traced_peak
from tests.kit.tiny import tiny

SIZES: dict[str, Any] = {
    "n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4, "vocab_size": 16000, "eval_iters": 1,
    "compile": True, "compile_blocks": True,
}  # fmt: skip
SENT = {"optimizer_offload": True, "gradient_offload": True}
MOVED = {"activation_checkpointing": True, "checkpoint_offload": True}
WAYS: list[dict[str, Any]] = [
    {}, {"master_weights": True}, {"loss_chunk_size": 256}, {"activation_checkpointing": True},
    {"activation_checkpointing": True, "checkpointed_blocks": 2}, {"recompute_norm_gelu": True},
    {"dropout": 0.1, "bias": True}, {"optimizer": "muon"}, {"recipe": "modern", "loss_chunk_size": 256},
    {"recipe": "nanochat"}, {"recipe": "llama", "n_kv_head": 2, "loss_chunk_size": 256, "master_weights": True},
    SENT, {**SENT, "master_weights": True, "loss_chunk_size": 256, "activation_checkpointing": True},
    {**SENT, "compile_blocks": False}, {**SENT, "compile_blocks": False, "master_weights": True, "loss_chunk_size": 256},
    {**SENT, "compile_blocks": False, "recipe": "llama", "loss_chunk_size": 256, "master_weights": True},
    {**SENT, "compile_blocks": False, "auto_chunker": True},
    MOVED, {**MOVED, "compile_blocks": False}, {**MOVED, "checkpointed_blocks": 3, "master_weights": True},
    {**MOVED, **SENT, "loss_chunk_size": 256, "master_weights": True}, {**MOVED, "recipe": "modern"},
]  # fmt: skip


def estimated(**changes: Any) -> int:
    spec = StepSpec.of(tiny(**SIZES | changes), GPU, dtype="bfloat16", compiled=True)
    return max(phase.tensors_bytes for phase in predict(spec).phases if phase.phase != "resume")


@pytest.mark.slow
@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_it_is_the_trace(changes: dict[str, Any]) -> None:
    found = traced_peak(tiny(**SIZES | changes), compiled=True)
    assert estimated(**changes) == pytest.approx(found, rel=0.001)


def test_a_model_compiled_as_a_whole_holds_all_gradients_at_once() -> None:
    """In half precision, 2 bytes of each weight, beside the 4 of .grad: so much more a block."""
    wide = {"n_embd": 512, "vocab_size": 256, "block_size": 16, "master_weights": True, "batch_size": 1}
    eight, sixteen = (
        estimated(**wide, n_layer=n, compile_blocks=False) - estimated(**wide, n_layer=n) for n in (8, 16)
    )
    assert sixteen - eight == pytest.approx(2 * 8 * 12 * 512 * 512, rel=0.05)


def test_gradients_on_the_host_take_nothing_of_the_card() -> None:
    def gradients(**changes: Any) -> int:
        spec = StepSpec.of(tiny(**SIZES, optimizer_offload=True, **changes), GPU, dtype="bfloat16", compiled=True)
        parts = predict(spec).phase("steady_step").components
        return sum(part.size_bytes for part in parts if part.id == "gradients")

    assert gradients() == 4 * ModelShape.of(tiny(**SIZES)).n_params
    assert gradients(gradient_offload=True) == 0


def test_plans_say_what_is_not_estimated() -> None:
    def unknown(**changes: Any) -> bool:
        return any(n.id == "compile_not_modelled" for n in plan(tiny(**SIZES | changes), GPU).notes)

    assert not unknown()
    assert unknown(auto_chunker=True)


TWO_PLANS = """
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec

sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4, "vocab_size": 16000}
if BLOCKS:
    blocks = RunConfig(**sizes, compile_blocks=True)
    predict(StepSpec.of(blocks, find("RTX 4070"), dtype="bfloat16", compiled=True))
print(plan(RunConfig(**sizes), find("RTX 4070")).timing.step_s.expected_s)
"""


def test_step_time_is_independent_of_blocks_planned_before() -> None:
    """A pass of compiled blocks tells few kernels; the plan of a model of few layers took it for its own."""
    alone, after = (
        subprocess.run(
            [sys.executable, "-c", TWO_PLANS.replace("BLOCKS", str(blocks))], capture_output=True, text=True, check=True
        ).stdout
        for blocks in (False, True)
    )
    assert float(after) == float(alone)
