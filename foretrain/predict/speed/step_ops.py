"""The whole step as operations: one micro-batch, the sum of gradients over micro-batches, the optimizer."""

from collections import Counter

from foretrain.hardware.catalogue import Dtype
from foretrain.hardware.cpu import cpu_has_bf16
from foretrain.model.shape import NS_STEPS, ModelShape, is_block_matrix
from foretrain.model.techniques import optimizer_of
from foretrain.predict.speed.ops import Operation, OperationList, Way
from foretrain.predict.speed.recorded_ops import micro_batch

FUSED_LAUNCHES = 40
# torch.optim.AdamW by lists of tensors (foreach), each of its nine kernels reading and writing whole tensors: decay,
# two moments in two kernels each, square root, bias correction, eps, addcdiv.
FOREACH_BYTES, FOREACH_LAUNCHES = (56.0, 36.0), 9


def accumulation(way: Way) -> list[Operation]:
    """What a micro-batch after the first adds: each gradient is added to `.grad`, fp32."""
    ops = OperationList(way, "accumulate")
    for numel, count in _tensors(way):
        ops.traffic("gradients", "accumulate", numel, 8, 4, count)
    return ops.found


def _tensors(way: Way, *, matrices: bool = True) -> list[tuple[int, int]]:
    """(elements, how many parameters have so many); with or without the matrices of the blocks."""
    shape = ModelShape.of(way.config)
    if matrices:
        return list(shape.numels.items())
    found = shape.parameters()
    return list(Counter(p.numel for p in found if not is_block_matrix(p.name, p.shape)).items())


def optimizer(way: Way) -> list[Operation]:
    """Unscaling (fp16), clipping and AdamW. Fused, it reads weight, gradient and two moments and writes three."""
    ops = OperationList(way)
    muon = way.config.optimizer == "muon"
    for numel, count in _tensors(way):
        if way.spec.dtype == "float16":
            ops.traffic("unscale", "clip", numel, 4, 4, count)
        off = way.config.optimizer_offload
        if off:
            ops.traffic("offload", "transfer", numel, 4, way.wide, count)  # gradients there, weights back
        ops.traffic("norm of gradients", "host" if off else "gradient_norm", numel, 4, 0, count)
        ops.traffic("clipping", "host" if off else "clip", numel, 4, 4, count)
        if way.wide == 2:
            ops.traffic("weights", "host" if off else "cast", numel, 4, 2, count)
    for numel, count in _tensors(way, matrices=not muon):
        other = optimizer_of(way.config).traffic(numel)
        read, written = other or ((16.0, 12.0) if way.torch.fused_adamw else FOREACH_BYTES)
        kind = "host" if way.config.optimizer_offload else "adamw"
        ops.traffic(way.config.optimizer if other else "adamw", kind, numel, read, written, count)
    return ops.found + (_muon(way) if muon else [])


def _muon(way: Way) -> list[Operation]:
    """model/muon.py: momentum in fp32, and Newton-Schulz of a rows x columns matrix, rows <= columns, in half precision
    where the device has it: three products an iteration, 5·(4·rows²·columns + 2·rows³) FLOPs."""
    ops = OperationList(way)
    dtype: Dtype = "bfloat16" if cpu_has_bf16() else "float32"
    if way.spec.cuda:
        dtype = way.spec.dtype if way.spec.half else "float16"  # as fast as bf16, and older cards have it too
    low = 4 if dtype == "float32" else 2
    for shape, count in ModelShape.of(way.config).block_matrices.items():
        rows, columns = sorted(shape)
        numel = rows * columns
        ops.traffic("momentum", "add", numel, 8, 4, 2 * count)
        if way.config.weight_decay:
            ops.traffic("weight decay", "clip", numel, 4, 4, count)
        ops.traffic("matrices together", "add", numel, 4, 4, count)
        ops.traffic("matrices together", "add", numel, 4 + 2 * low, 2 * low, count)  # cast, length and division
        for m, n, k in ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows)):
            ops.matmul("newton-schulz", m, n, k, NS_STEPS * count, dtype)
        ops.traffic("update", "add", numel, low + 8, 8, count)
    return ops.found


def optimizer_launches(way: Way) -> int:
    """Kernels of the optimizer step. Foreach and fused ones take many tensors at once; 8-bit AdamW goes by chunks."""
    if way.spec.cuda and not way.torch.fused_adamw:  # torch 1.13 goes from tensor to tensor
        return FUSED_LAUNCHES + FOREACH_LAUNCHES * sum(count for _, count in _tensors(way))
    return FUSED_LAUNCHES + sum(count * optimizer_of(way.config).launches(numel) for numel, count in _tensors(way))


def step(way: Way) -> list[Operation]:
    """All operations of one optimizer step."""
    n = way.config.gradient_accumulation_steps
    micro = [op._replace(runs=op.runs * n) for op in micro_batch(way)]
    sums = [op._replace(runs=op.runs * (n - 1)) for op in accumulation(way)] if n > 1 else []
    return micro + sums + optimizer(way)
