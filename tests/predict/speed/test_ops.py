"""The list of operations against PyTorch's own: FLOPs by FlopCounterMode, bytes kernel by kernel of a real step."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.model import low_precision
from foretrain.model.gpt2 import NanoGPT
from foretrain.model.step import build
from foretrain.predict.abstract import step as abstract_step
from foretrain.predict.estimate.simulated_run import SimulatedRun
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, Operation, accumulation, flops, micro_batch, optimizer, step
from tests.kit.operations import ATTENTION, counted, way
from tests.kit.tiny import tiny


def nbytes(operations: list[Operation]) -> int:
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


class Traffic(TorchDispatchMode):
    """Bytes that the kernels of a real step read and write, each tensor once, and how many kernels there are."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(x): x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        outs = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given.values()}
        views = not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in known for x in outs)
        name = func._schema.name.removeprefix("aten::")
        if views or "empty" in name or (name == "copy_" and args[0].data_ptr() == args[1].data_ptr()):
            return out
        self.count += 1
        self.nbytes += self.read(name, list(given.values()), outs) + self.size(*outs)
        if name in ("scatter_add_", "index_add_"):  # which write a few rows
            self.nbytes -= self.size(*outs)
        return out

    @staticmethod
    def size(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    def read(self, name: str, given: list[Tensor], outs: list[Tensor]) -> int:
        """What is read of what a kernel is given: of a table some rows, of a result to overwrite nothing."""
        if name.endswith("_like"):
            return 0
        if name == "embedding":
            return self.size(*outs, given[1])
        if name in ("gather", "nll_loss_forward"):
            return self.size(given[1])
        if name == "nll_loss_backward":
            return self.size(given[2])
        if name in ("copy_", "fill_", "zero_", "scatter_add_", "index_add_"):
            return self.size(*given[1:])
        if name == "mm" and len(given) == 3:  # out=
            return self.size(*given[:2])
        # The gradients of a norm's input and of its weight are two kernels, each of which reads the gradient.
        return self.size(*given) + (self.size(given[0]) if name == "native_layer_norm_backward" else 0)


def traffic(config: RunConfig, dtype: torch.dtype, *, train: bool) -> Traffic:
    state = build(config, torch.device("cpu"), dtype, compile=False)
    state.model.train(train)
    idx = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
    found = Traffic()
    with found, torch.set_grad_enabled(train):
        with state.autocast():
            loss = state.call(idx, idx)
        if train:
            loss.backward()
    return found


IN_FP32 = ({}, {"loss_chunk_size": 100}, {"recipe": "modern"}, {"recipe": "nanochat"}, {"recipe": "llama"})


@pytest.mark.parametrize(
    ("options", "dtype"), [*((options, "float32") for options in IN_FP32), *((options, "bfloat16") for options in (
        {}, {"bias": True}, {"activation_checkpointing": True}, {"recompute_norm_gelu": True},
        {"loss_chunk_size": 100}, {"master_weights": True}, {"matmul": "fp8"}, {"matmul": "int8", "bias": True},
        {"recipe": "modern"}, {"recipe": "modern", "loss_chunk_size": 64, "activation_checkpointing": True},
        {"recipe": "nanochat"}, {"recipe": "llama"}, {"recipe": "llama", "n_kv_head": 2, "qk_norm": True, "head_dim": 48, "tied_embeddings": True},
        {"recipe": "llama", "n_kv_head": 1, "activation_checkpointing": True, "master_weights": True},
    ))],
    ids=str,
)  # fmt: skip
def test_bytes_are_those_of_the_kernels_of_a_real_step(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_precision.cpu, "sums_are_exact", True)  # not every processor sums right, none is asked to
    config = tiny(n_layer=2, n_head=4, n_embd=128, block_size=64, batch_size=4, vocab_size=512, **options)
    for train in (True, False):
        real, ours = traffic(config, getattr(torch, dtype), train=train), micro_batch(way(config, dtype, train=train))
        assert nbytes(ours) == pytest.approx(real.nbytes, rel=0.001 if config.recipe == "nanogpt" else 0.01)
        # The gradient of an embedding is a fill and a scatter, which PyTorch dispatches as one.
        assert sum(op.runs for op in ours) == pytest.approx(real.count, rel=0.03, abs=4)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flops_of_nanogpts_step_are_those_of_flop_counter_mode(dropout: float) -> None:
    """With dropout a CPU writes attention out, whose backward pass is two products for each one, and not two and a half."""
    config = tiny(dropout=dropout)
    model, idx = NanoGPT(config), torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        model(idx, idx)[1].backward()
    found = micro_batch(
        MicroBatchRun(StepSpec.of(config, cpu_device(), "nanogpt", dtype="float32", compiled=False), True)
    )
    assert flops(found) == counter.get_total_flops()


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
    nano = MicroBatchRun(StepSpec.of(config, find("RTX 4070"), "nanogpt", dtype="bfloat16", compiled=True), True)
    ours = MicroBatchRun(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=True), True)
    logits = config.batch_size * config.block_size * config.vocab_size
    assert nbytes(micro_batch(nano)) - nbytes(micro_batch(ours)) == 2 * 2 * logits  # a zero tangent, written and read


@pytest.mark.parametrize("compiled", [False, True])
def test_operations_do_not_hang_on_what_was_estimated_before(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a compiled step is traced as a graph, which has no kernels to list."""
    config = tiny(n_layer=3)
    found = []
    for estimate in (None, True, False):
        for kept in ("_recorders", "_structures", "_launches", "_alike"):
            monkeypatch.setattr(abstract_step, kept, {})
        if estimate is not None:
            SimulatedRun(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=estimate)).peaks()
        found.append(
            micro_batch(MicroBatchRun(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=compiled), True))
        )
    assert found[0]
    assert found[0] == found[1] == found[2]
