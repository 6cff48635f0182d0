"""Steps of other programs as operations, at the plan's rates: those that `foretrain plan` has no option for.

A case of published_logs.json names in `program` how its model and optimizer differ from nanoGPT's. Widths, matmuls,
attention and optimizer are exact; kernels are those that other_model.py runs, fused where the step is compiled. No
constant here is a speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.abstract import programs
from foretrain.predict.speed import ops as recorded_ops
from foretrain.predict.speed.ops import FOREACH_BYTES, MicroBatchRun, Operation, OperationList
from foretrain.predict.speed.rates import busy_s, rates_of


@dataclass(frozen=True)
class Program:
    """How a program's step differs from nanoGPT's; what is 0 is as there."""

    attention_width: int = 0  # heads x their width, where that is not the model's width
    kv_width: int = 0
    d_ff: int = 0
    gated: bool = False  # SwiGLU: three matmuls in the feed-forward part
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

    def layers(self, C: int) -> Iterator[tuple[int, int]]:
        """Yield (outputs, inputs) of a block's linear layers, in a model of this width."""
        wide = self.attention_width or C
        kv, ff = self.kv_width or wide, self.d_ff or 4 * C
        yield from ((wide, C), (kv, C), (kv, C)) if self.separate_qkv or kv != wide else ((3 * wide, C),)
        yield C, wide
        yield from ((ff, C),) * (1 + self.gated)
        yield C, ff


def _optimizer(way: MicroBatchRun, program: Program) -> Iterator[Operation]:
    """Yield the sums of micro-batches' gradients, then AdamW over all parameters at 16 and 12 bytes each in fp32, half
    of that in half precision; Muon's matmuls.
    """
    ops = OperationList(way)
    shape = ops.shape
    layers = list(program.layers(shape.n_embd))
    matrices = sum(wide * narrow for wide, narrow in layers) * shape.n_layer
    more = way.config.gradient_accumulation_steps - 1
    if more:
        ops.traffic("gradients", "accumulate", matrices + shape.vocab_size * shape.n_embd, 8, 4, more)
    other = (2 - program.tied) * shape.vocab_size * shape.n_embd + shape.block_size * shape.n_embd
    n = other if program.muon else other + matrices
    read, written = (16.0, 12.0) if program.optimizer == "fused" else FOREACH_BYTES
    scale = 0.5 if program.half_weights else 1.0
    ops.traffic("adamw", "adamw", n, read * scale, written * scale)
    if program.muon:
        ops.traffic("momentum", "add", matrices, 24, 16)
        for pair in layers:
            rows, columns = sorted(pair)
            for m, k, inner in ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows)):
                ops.matmul("newton-schulz", m, k, inner, 5 * shape.n_layer)
    yield from ops.found


def micro_batch(way: MicroBatchRun, program: Program) -> list[Operation]:
    model = programs.load("other_model").OtherGPT
    attention = "written" if program.written_attention else ""
    return recorded_ops.micro_batch(way, lambda config: model(config, program, way.spec.step), attention)


def expected_s(case: dict[str, Any], config: RunConfig, gpu: Gpu, way: MicroBatchRun) -> float:
    """Return seconds of the step, added up as in time.py."""
    program = Program.of(case)
    if program.half_weights:
        config = config.model_copy(update={"master_weights": True})
        way = replace(way, spec=replace(way.spec, config=config, step="foretrain"))
    rates = rates_of(gpu, way.spec.dtype, "dtype", way.torch)
    assert rates
    micro = micro_batch(way, program)
    launching_s = sum(op.runs for op in micro) * rates.launch_s(compiled=way.compiled) + rates.python_s
    total = config.gradient_accumulation_steps * max(busy_s(micro, rates), launching_s)
    return total + busy_s(list(_optimizer(way, program)), rates)
