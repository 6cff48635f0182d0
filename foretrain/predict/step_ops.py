"""The whole step as operations: one micro-batch, the sum of gradients over micro-batches, the optimizer."""

from collections import Counter

from foretrain.lm.shape import ModelShape
from foretrain.predict.compiled_ops import CompiledOps
from foretrain.predict.eager_ops import EagerOps
from foretrain.predict.ops import Operation, OperationList, Way


def micro_batch(way: Way) -> list[Operation]:
    """Forward and, where the step trains, backward pass of one micro-batch."""
    ops = CompiledOps(way) if way.compiled else EagerOps(way)
    ops.forward()
    if way.train:
        ops.backward()
    return [op for op in ops.found if op.runs and (op.flops or op.nbytes)]


def accumulation(way: Way) -> list[Operation]:
    """What a micro-batch after the first adds: each gradient is added to `.grad`, fp32."""
    ops = OperationList(way)
    ops.part = "accumulate"
    for numel, count in _tensors(way):
        ops.traffic("gradients", "accumulate", numel, 8, 4, count)
    return ops.found


def _tensors(way: Way) -> list[tuple[int, int]]:
    """(elements, how many parameters have so many)."""
    return list(Counter(p.numel for p in ModelShape.of(way.config).parameters()).items())


def optimizer(way: Way) -> list[Operation]:
    """Unscaling (fp16), clipping and AdamW, fused: it reads weight, gradient and two moments and writes three."""
    ops = OperationList(way)
    ops.part = "optimizer"
    for numel, count in _tensors(way):
        if way.dtype == "float16":
            ops.traffic("unscale", "clip", numel, 4, 4, count)
        if way.own.optimizer_offload:
            ops.traffic("offload", "transfer", numel, 4, way.wide, count)  # gradients there, weights back
        off = way.own.optimizer_offload
        ops.traffic("norm of gradients", "host" if off else "gradient_norm", numel, 4, 0, count)
        ops.traffic("clipping", "host" if off else "clip", numel, 4, 4, count)
        ops.traffic("adamw", "host" if off else "adamw", numel, 16, 12, count)
        if way.wide == 2:
            ops.traffic("weights", "host" if off else "cast", numel, 4, 2, count)
    return ops.found


def step(way: Way) -> list[Operation]:
    """All operations of one optimizer step."""
    n = way.config.gradient_accumulation_steps
    micro = [op._replace(runs=op.runs * n) for op in micro_batch(way)]
    sums = [op._replace(runs=op.runs * (n - 1)) for op in accumulation(way)] if n > 1 else []
    return micro + sums + optimizer(way)
