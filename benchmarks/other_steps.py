"""Steps of other programs as operations, at the plan's rates: what `foretrain plan` has no option for.

A case of published_logs.json names in `program` how its model and optimizer differ from nanoGPT's. Widths, products,
attention and optimizer are exact. Eager kernels are those that other_model.py runs; of compiled ones that only move
bytes the passes over tensors are counted, as Inductor fuses them. No constant stands here for a speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.abstract import programs
from foretrain.predict.software import Software
from foretrain.predict.speed.compiled_ops import CompiledOps
from foretrain.predict.speed.ops import Kind, Operation, OperationList, Way
from foretrain.predict.speed.rates import rates_of
from foretrain.predict.speed.recorded_ops import recorded
from foretrain.predict.speed.step_ops import FOREACH_BYTES
from foretrain.predict.speed.time import PYTHON_S, busy_s

# From here on Inductor makes one kernel of scale, mask, softmax and casts (a trace with torch 2.13 shows it); with torch
# 2.0 it took as long as the kernels one by one do (languini-kitchen's steps on an A100 and a 3090).
FUSES_ATTENTION = Software(2, 1)


@dataclass(frozen=True)
class Program:
    """How a program's step differs from nanoGPT's; what is 0 is as there."""

    attention_width: int = 0  # heads x their width, where that is not the model's width
    kv_width: int = 0
    d_ff: int = 0
    gated: bool = False  # SwiGLU: three products in the feed-forward part
    separate_qkv: bool = False
    rotary: bool = False
    written_attention: bool = False
    tied: bool = True
    half_weights: bool = False  # weights and residual stream in half precision, no autocast
    logits_fp32: bool = False  # Hugging Face: logits cast to fp32 and shifted by a copy
    optimizer: Literal["fused", "foreach"] = "fused"
    muon: bool = False

    @classmethod
    def of(cls, case: dict[str, Any]) -> "Program":
        return cls(**case["program"])


class _Blocks(OperationList):
    """The products and the attention of a block with a program's widths."""

    program: Program

    def layers(self) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) of a block's linear layers."""
        p, C = self.program, self.shape.n_embd
        wide = p.attention_width or C
        kv, ff = p.kv_width or wide, p.d_ff or 4 * C
        if p.separate_qkv or kv != wide:
            yield from (("q", wide, C), ("k", kv, C), ("v", kv, C))
        else:
            yield "attn", 3 * wide, C
        yield "proj", C, wide
        yield from ((("gate", ff, C),) if p.gated else ())
        yield from (("fc", ff, C), ("out", C, ff))

    @property
    def block_weights(self) -> int:
        return sum(wide * narrow for _, wide, narrow in self.layers())

    def blocks_matmuls(self, *, backward: bool, count: int) -> None:
        for name, wide, narrow in self.layers():
            (self.linear_backward if backward else self.linear)(name, wide, narrow, self.tokens, count)

    @property
    def inner(self) -> int:
        """Elements of q, and of attention's output."""
        return self.tokens * (self.program.attention_width or self.shape.n_embd)

    def attention(self, count: int, *, backward: bool = False) -> None:
        heads, inner = self.shape.n_head, self.inner
        width = inner // self.tokens // heads
        flops, tensor = 4 * inner * self.block, self.way.low * inner
        kind: Kind = "attention_backward" if backward else "attention"
        read, written = (5, 3) if backward else (3, 1)
        self.found.append(
            Operation(
                "attention", kind, self.part, count, (self.batch, heads, self.block, width), self.way.dtype,
                flops * 5 // 2 if backward else flops, read * tensor, written * tensor,
            )
        )  # fmt: skip

    def attention_matmuls(self, count: int, *, backward: bool = False) -> None:
        rows, T = self.batch * self.shape.n_head * self.block, self.block
        D = self.inner // self.tokens // self.shape.n_head
        for m, n, k in ((rows, T, D), (rows, D, T)) * (1 + backward):
            self.matmul("attention", "matmul", m, n, k, count)


class OtherCompiled(_Blocks, CompiledOps):
    """As Inductor fuses them: norms, activations and rotary positions take one kernel each way."""

    def __init__(self, way: Way, program: Program) -> None:
        super().__init__(way)
        self.program = program

    def attend(self, count: int, *, backward: bool = False) -> None:
        if not self.program.written_attention:
            self.attention(count, backward=backward)
            return
        self.attention_matmuls(count, backward=backward)
        if self.way.torch >= FUSES_ATTENTION:
            low = self.way.low
            self.traffic("attention", "fused", self.scores, (1 + backward) * low, low, count)
        else:
            self.attention_passes(count, backward=backward)

    def attention_passes(self, count: int, *, backward: bool = False) -> None:
        """nanoGPT's lines between the products, a kernel each: scale, mask, softmax (autocast: in fp32), dropout."""
        low, S, casts = self.way.low, self.scores, self.way.casts
        wide = 4 if casts else low
        self.traffic("attention", "add", S, low, low, count)
        self.traffic("attention", "add", S, low, low, count)
        self.traffic("attention", "cast", S, low, wide, count if casts else 0)
        self.traffic("attention", "softmax_backward" if backward else "softmax", S, (1 + backward) * wide, wide, count)
        if self.way.config.dropout and self.way.train:
            self.traffic("attention", "dropout", S, wide + backward, wide + (not backward), count)
        self.traffic("attention", "cast", S, wide, low, count if casts else 0)

    @property
    def scores(self) -> int:
        """Elements of all heads' T x T matrices."""
        return self.batch * self.shape.n_head * self.block**2

    def traffic(self, name: str, kind: Kind, elements: int, read: float, written: float, count: int = 1) -> None:
        if name == "attention" and elements == self.scores:
            OperationList.traffic(self, name, kind, elements, read, written, count)
        else:
            super().traffic(name, kind, elements, read, written, count)

    def block_forward(self, count: int) -> None:
        p, low = self.program, self.way.low
        inner = self.tokens * (p.d_ff or 4 * self.shape.n_embd)
        self.norm_forward(2 * count)
        self.blocks_matmuls(backward=False, count=count)
        if p.rotary:
            self.traffic("rotary", "fused", 2 * self.inner, low, low, count)
        self.attend(count)
        self.traffic("gelu", "gelu", inner, (1 + p.gated) * low, low, count)

    def block_backward(self, count: int) -> None:
        p, low = self.program, self.way.low
        inner = self.tokens * (p.d_ff or 4 * self.shape.n_embd)
        self.norm_backward(2 * count)
        self.blocks_matmuls(backward=True, count=count)
        if self.way.casts:
            self.traffic("weight gradients", "fused", self.block_weights, 2, 4, count)
        self.traffic("gelu", "gelu_backward", inner, (2 + p.gated) * low, (1 + p.gated) * low, count)
        self.attend(count, backward=True)
        self.traffic("attention", "fused", 3 * self.elements, low, low, count)


def _optimizer(ops: _Blocks, program: Program) -> Iterator[Operation]:
    """AdamW over all parameters at 16 and 12 bytes each in fp32, half of that in half precision; Muon's products."""
    shape = ops.shape
    matrices = ops.block_weights * shape.n_layer
    other = (2 - program.tied) * shape.vocab_size * shape.n_embd + shape.block_size * shape.n_embd
    n = other if program.muon else other + matrices
    read, written = (16.0, 12.0) if program.optimizer == "fused" else FOREACH_BYTES
    scale = 0.5 if program.half_weights else 1.0
    ops.part, ops.found = "optimizer", []
    ops.traffic("adamw", "adamw", n, read * scale, written * scale)
    if program.muon:
        ops.traffic("momentum", "add", matrices, 24, 16)
        for _, wide, narrow in ops.layers():
            rows, columns = sorted((wide, narrow))
            for m, k, inner in ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows)):
                ops.matmul("newton-schulz", "matmul", m, k, inner, 5 * shape.n_layer)
    yield from ops.found


def micro_batch(way: Way, program: Program) -> list[Operation]:
    """Forward and backward pass of one micro-batch."""
    if way.compiled:
        ops = OtherCompiled(way, program)
        ops.forward()
        ops.backward()
        return [op for op in ops.found if op.runs]
    # torch 1.13 has no kernel for attention, so that it is written out.
    own = replace(way, step="foretrain", torch=Software(1, 13) if program.written_attention else way.torch)
    model = programs.load("other_model").OtherGPT
    return recorded(own, lambda config: model(config, program))


def expected_s(case: dict[str, Any], config: RunConfig, gpu: Gpu, way: Way) -> float:
    """Seconds of the step, as time.py adds operations up."""
    program = Program.of(case)
    if program.half_weights:
        config = config.model_copy(update={"master_weights": True})
        way = replace(way, config=config, step="foretrain")
    rates = rates_of(gpu, way.dtype, "dtype", way.torch)
    assert rates
    ops = OtherCompiled(way, program)
    micro = micro_batch(way, program)
    launching_s = sum(op.runs for op in micro) * rates.launch_s(compiled=way.compiled) + PYTHON_S
    n = config.gradient_accumulation_steps
    total = n * max(busy_s(micro, rates), launching_s)
    if n > 1:
        weights = ops.block_weights * ops.shape.n_layer + ops.shape.vocab_size * ops.shape.n_embd
        ops.part, ops.found = "accumulate", []
        ops.traffic("gradients", "accumulate", weights, 8, 4, n - 1)
        total += busy_s(ops.found, rates)
    return total + busy_s(list(_optimizer(ops, program)), rates)
