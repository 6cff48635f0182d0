"""The list of operations against PyTorch's FlopCounterMode, and the bytes against closed forms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.config.options import RunConfig
from foretrain.model.shape import ModelShape
from foretrain.predict.speed.ops import Operation, Way, flops
from foretrain.predict.speed.step_ops import accumulation, micro_batch, optimizer, step
from tests.kit.operations import counted, way
from tests.kit.tiny import tiny


def nbytes(operations: list[Operation]) -> int:
    """Bytes that the kernels of a list read and write."""
    return sum(op.runs * op.nbytes for op in operations)


@settings(max_examples=30)
@given(
    layers=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]), width=st.integers(1, 4), block=st.integers(2, 48),
    vocab=st.integers(17, 600), batch=st.integers(1, 3), bias=st.booleans(), checkpointed=st.integers(0, 3),
    master=st.booleans(), cheap=st.booleans(), chunk=st.sampled_from([0, 20, 1000]), half=st.booleans(), train=st.booleans(),
)  # fmt: skip
def test_flops_are_those_of_flop_counter_mode(
    layers: int, heads: int, width: int, block: int, vocab: int, batch: int, bias: bool, checkpointed: int,
    master: bool, cheap: bool, chunk: int, half: bool, train: bool,
) -> None:  # fmt: skip
    config = tiny(
        n_layer=layers, n_head=heads, n_embd=16 * heads * width, block_size=block, vocab_size=vocab, batch_size=batch,
        bias=bias, activation_checkpointing=checkpointed > 0, checkpointed_blocks=checkpointed, loss_chunk_size=chunk,
        master_weights=master, recompute_norm_gelu=cheap,
    )  # fmt: skip
    dtype = "bfloat16" if half else "float32"
    measured = counted(config, getattr(torch, dtype), train=train)
    assert flops(micro_batch(way(config, dtype, train=train))) == pytest.approx(measured, rel=1e-3)
    # What is fused changes bytes, never FLOPs; Inductor also leaves out what recomputation does not need.
    if not checkpointed:
        assert flops(micro_batch(way(config, dtype, train=train, compiled=True))) == pytest.approx(measured, rel=1e-3)


def test_flops_are_6n_and_12lct() -> None:
    """nanoGPT's formula counts 6N with norms in N; ours counts products alone, so they differ by the vectors."""
    config = RunConfig()
    shape, tokens = ModelShape.of(config), config.batch_size * config.block_size
    found = flops(micro_batch(way(config)))
    # 2.5 backward instead of 2: attention is 14·L·C·T in FlopCounterMode's convention
    attention = 14 * config.n_layer * config.n_embd * config.block_size * tokens
    assert found == 6 * shape.n_matmul_params * tokens + attention
    assert found - attention == pytest.approx(shape.flops_per_token_6n * tokens, rel=1e-3)
    assert flops(micro_batch(way(config)), causal=True) == found - attention // 2


def test_a_step_is_its_parts() -> None:
    config = tiny(gradient_accumulation_steps=4)
    w = way(config)
    assert flops(step(w)) == 4 * flops(micro_batch(w))
    assert nbytes(step(w)) == 4 * nbytes(micro_batch(w)) + 3 * nbytes(accumulation(w)) + nbytes(optimizer(w))


def test_the_optimizer_moves_28_bytes_a_parameter() -> None:
    """Fused AdamW reads weight, gradient and two moments and writes three, in fp32."""
    config = tiny()
    found = [op for op in optimizer(way(config)) if op.kind == "adamw"]
    assert nbytes(found) == 28 * ModelShape.of(config).n_params


def test_fusing_and_chunking_change_bytes_as_they_should() -> None:
    config = RunConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8)
    eager, compiled = (nbytes(micro_batch(way(config, "bfloat16", compiled=c))) for c in (False, True))
    assert compiled < 0.7 * eager
    chunked = config.model_copy(update={"loss_chunk_size": 512})
    assert flops(micro_batch(way(chunked))) == flops(micro_batch(way(config)))
    nano = Way(config, "bfloat16", "nanogpt", True, True, cuda=True)
    ours = Way(config, "bfloat16", "foretrain", True, True, cuda=True)
    logits = config.batch_size * config.block_size * config.vocab_size
    assert nbytes(micro_batch(nano)) - nbytes(micro_batch(ours)) == 2 * 2 * logits  # a zero tangent, written and read
