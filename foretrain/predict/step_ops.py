"""The whole step as operations: one micro-batch, the sum of gradients over micro-batches, the optimizer."""

from collections import Counter

from foretrain.lm.adamw8bit_sizes import is_quantised, n_chunks
from foretrain.lm.shape import ModelShape
from foretrain.predict.compiled_ops import CompiledOps
from foretrain.predict.eager_ops import EagerOps
from foretrain.predict.ops import Operation, OperationList, Way

FUSED_LAUNCHES = 40
# lm/adamw8bit.py: bytes an element that its kernels read and write; tests/test_adamw8bit.py counts a real step's.
EIGHT_BIT_BYTES, EIGHT_BIT_LAUNCHES = (116.0, 100.0), 36
FP32_MOMENTS_BYTES = (48.0, 32.0)


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
    """Unscaling (fp16), clipping and AdamW. Fused, it reads weight, gradient and two moments and writes three."""
    ops = OperationList(way)
    ops.part = "optimizer"
    for numel, count in _tensors(way):
        if way.dtype == "float16":
            ops.traffic("unscale", "clip", numel, 4, 4, count)
        off = way.own.optimizer_offload
        if off:
            ops.traffic("offload", "transfer", numel, 4, way.wide, count)  # gradients there, weights back
        ops.traffic("norm of gradients", "host" if off else "gradient_norm", numel, 4, 0, count)
        ops.traffic("clipping", "host" if off else "clip", numel, 4, 4, count)
        read, written = 16, 12
        if way.own.optimizer == "adamw8bit":
            read, written = EIGHT_BIT_BYTES if is_quantised(numel) else FP32_MOMENTS_BYTES
        ops.traffic(way.own.optimizer, "host" if off else "adamw", numel, read, written, count)
        if way.wide == 2:
            ops.traffic("weights", "host" if off else "cast", numel, 4, 2, count)
    return ops.found


def optimizer_launches(way: Way) -> int:
    """Kernels of the optimizer step. Foreach and fused ones take many tensors at once; 8-bit AdamW goes by chunks."""
    if way.step != "foretrain" or way.config.optimizer != "adamw8bit":
        return FUSED_LAUNCHES
    chunks = sum(count * n_chunks(numel) for numel, count in _tensors(way))
    return FUSED_LAUNCHES + EIGHT_BIT_LAUNCHES * chunks


def step(way: Way) -> list[Operation]:
    """All operations of one optimizer step."""
    n = way.config.gradient_accumulation_steps
    micro = [op._replace(runs=op.runs * n) for op in micro_batch(way)]
    sums = [op._replace(runs=op.runs * (n - 1)) for op in accumulation(way)] if n > 1 else []
    return micro + sums + optimizer(way)
