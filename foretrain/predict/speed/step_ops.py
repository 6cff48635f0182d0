"""The whole step as operations: one micro-batch, the sum of gradients over micro-batches, the optimizer."""

from collections import Counter
from functools import lru_cache

from foretrain.hardware.catalogue import Dtype
from foretrain.hardware.cpu import cpu_has_bf16
from foretrain.model.shape import ModelShape
from foretrain.model.techniques import OPTIMIZERS, optimizer_of
from foretrain.model.techniques.technique import Optimizer
from foretrain.predict.speed.ops import Operation, OperationList, Way
from foretrain.predict.speed.recorded_ops import micro_batch

FUSED_LAUNCHES = 40
# Of a parameter that is updated in the backward pass; tests/test_in_backward.py counts a real step's.
UPDATE_LAUNCHES = 8
# torch.optim.AdamW by lists of tensors (foreach), each of its nine kernels reading and writing whole tensors: decay,
# two moments in two kernels each, square root, bias correction, eps, addcdiv.
FOREACH_BYTES, FOREACH_LAUNCHES = (56.0, 36.0), 9


def accumulation(way: Way) -> list[Operation]:
    """What a micro-batch after the first adds: each gradient is added to `.grad`, fp32; on the host beside other work
    (on_host.py)."""
    ops = OperationList(way, "accumulate")
    for numel, count in [] if way.config.gradient_offload else _tensors(way):
        ops.traffic("gradients", "accumulate", numel, 8, 4, count)
    return ops.found


def _tensors(way: Way) -> list[tuple[int, int]]:
    """(elements, how many parameters have so many)."""
    return list(ModelShape.of(way.config).numels.items())


def _elementwise(way: Way) -> list[tuple[int, int]]:
    """The same of the parameters that are updated element by element."""
    return _beside(ModelShape.of(way.config), way.config.optimizer)


@lru_cache(maxsize=256)
def _beside(shape: ModelShape, optimizer: str) -> list[tuple[int, int]]:
    """(elements, how many) of a model's parameters that an optimizer of this name leaves to AdamW."""
    if type(OPTIMIZERS[optimizer]).takes is Optimizer.takes:  # of AdamW itself, and what differs in its states alone
        return list(shape.numels.items())
    taken = OPTIMIZERS[optimizer].takes
    return list(Counter(p.numel for p in shape.parameters() if not taken(p.name, p.shape)).items())


def optimizer(way: Way) -> list[Operation]:
    """Unscaling (fp16), clipping and AdamW. Fused, it reads weight, gradient and two moments and writes three."""
    ops = OperationList(way)
    chosen = optimizer_of(way.config)
    for numel, count in _tensors(way):
        if way.spec.dtype == "float16":
            ops.traffic("unscale", "clip", numel, 4, 4, count)
        off = way.config.optimizer_offload
        if off:
            there = 0 if way.config.gradient_offload else 4  # sums of gradients, unless they went there already
            ops.traffic("offload", "transfer", numel, there, way.wide, count)  # and weights back
        ops.traffic("norm of gradients", "host" if off else "gradient_norm", numel, 4, 0, count)
        if not way.spec.updates_in_backward:
            ops.traffic("clipping", "host" if off else "clip", numel, 4, 4, count)
        if way.wide == 2:
            ops.traffic("weights", "host" if off else "cast", numel, 4, 2, count)
    for numel, count in _elementwise(way):
        other = chosen.traffic(numel)
        read, written = other or ((16.0, 12.0) if way.torch.fused_adamw else FOREACH_BYTES)
        kind = "host" if way.config.optimizer_offload else "adamw"
        ops.traffic(way.config.optimizer if other else "adamw", kind, numel, read, written, count)
    chosen.operations(ops, way.config, _half(way))
    return ops.found


def _half(way: Way) -> Dtype:
    """The dtype of an optimizer's matmuls: half precision where the device has it."""
    if way.spec.cuda:
        return way.spec.dtype if way.spec.half else "float16"  # as fast as bf16, and older cards have it too
    return "bfloat16" if cpu_has_bf16() else "float32"


def optimizer_launches(way: Way) -> int:
    """Kernels of the optimizer step. Foreach and fused ones take many tensors at once; 8-bit AdamW goes by chunks."""
    if way.spec.cuda and not way.torch.fused_adamw:  # torch 1.13 goes from tensor to tensor
        return FUSED_LAUNCHES + FOREACH_LAUNCHES * tensor_count(way)
    if way.spec.updates_in_backward:
        return UPDATE_LAUNCHES * tensor_count(way)
    return FUSED_LAUNCHES + sum(count * optimizer_of(way.config).launches(numel) for numel, count in _tensors(way))


def tensor_count(way: Way) -> int:
    return sum(count for _, count in _tensors(way))


def step(way: Way) -> list[Operation]:
    n = way.config.gradient_accumulation_steps
    micro = [op._replace(runs=op.runs * n) for op in micro_batch(way)]
    sums = [op._replace(runs=op.runs * (n - 1)) for op in accumulation(way)] if n > 1 else []
    return micro + sums + optimizer(way)
