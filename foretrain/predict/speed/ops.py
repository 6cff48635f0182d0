"""A training step as a list of operations: FLOPs, bytes read and written, shape and dtype of each. No torch.

FLOP convention: a multiply-add is two; attention counts the full T x T square forward (4·B·T²·C) and two and a half
times that backward, as torch.utils.flop_counter does, so sums equal FlopCounterMode's. Flash attention really does the
causal half: `causal_flops`. Only matmuls and attention count FLOPs, as there; all else is bytes. Bytes are those of the
kernels that PyTorch runs (aten native kernels eager; Inductor's fusions compiled), each tensor read or written once per
kernel; rates.py accounts for caches. Letters as in config/shape.py.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple

from foretrain.config.checks import EIGHT_BITS
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Dtype, MatmulMode
from foretrain.hardware.cpu import cpu_has_bf16
from foretrain.model.techniques import OPTIMIZERS, optimizer_of
from foretrain.model.techniques.technique import Optimizer
from foretrain.predict.abstract.dims import Launch
from foretrain.predict.abstract.fusion import fused
from foretrain.predict.abstract.step import EagerProgram, Fuse, Make
from foretrain.predict.abstract.tensors import bfloat16
from foretrain.predict.software import ASSUMED, Software
from foretrain.predict.spec import StepSpec, letters_of
from foretrain.predict.timeline import Timeline

Kind = Literal[
    "matmul", "matmul_input", "matmul_weight",  # x·Wᵀ, and backward: dy·W and dyᵀ·x
    "attention", "attention_backward", "attention_bmm", "attention_bmm_backward",
    "norm", "norm_backward", "gelu", "gelu_backward",
    "softmax", "softmax_backward", "fill", "gather", "scatter",
    "cast", "add", "range", "join", "dropout", "accumulate", "fused", "adamw", "clip", "gradient_norm",
    "transfer", "host",  # between card and computer, and in the computer's memory
]  # fmt: skip
Part = Literal["forward", "recompute", "backward", "accumulate", "optimizer"]


class Operation(NamedTuple):
    """`runs` kernels of one kind. `shape`: (m, n, k) of a matmul, (B, H, T, D) of attention, else (elements,)."""

    name: str
    kind: Kind
    part: Part
    runs: int
    shape: tuple[int, ...]
    dtype: Dtype
    flops: int  # of one
    read_bytes: int  # of one
    written_bytes: int  # of one
    arithmetic: MatmulMode = "dtype"  # of a matmul

    @property
    def nbytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def causal_flops(self) -> int:
        """Return FLOPs that are really computed: flash attention leaves out the half above the diagonal."""
        return self.flops // 2 if self.kind.startswith("attention") else self.flops


@dataclass(frozen=True)
class MicroBatchRun:
    spec: StepSpec
    train: bool = True
    torch: Software = ASSUMED
    found: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # cache of properties

    @property
    def config(self) -> RunConfig:
        return self.spec.config

    @property
    def compiled(self) -> bool:
        return self.spec.compiled and self.torch.compiles

    @property
    def attention(self) -> Any:
        """Return the kernel of eager attention; nanoGPT writes it out where torch has none, and a CPU with dropout."""
        if not self.torch.fused_attention:
            return "written"
        return "math" if not self.spec.cuda and self.config.dropout and self.train else "flash"

    @property
    def batch(self) -> tuple[int, int]:
        c = self.config
        return (c.batch_size, c.block_size) if self.train else (c.eval_batch, c.eval_block)

    @property
    def matmul_attention(self) -> bool:
        return not self.spec.cuda and self.spec.bmm_attention and not (self.train and self.config.dropout)

    @property
    def low(self) -> int:
        return 2 if self.spec.half else 4

    @property
    def wide(self) -> int:
        return self.spec.variant.wide


class OperationList:
    def __init__(self, way: MicroBatchRun, part: Part = "optimizer") -> None:
        self.way = way
        self.shape = ModelShape.of(way.config)
        self.part: Part = part
        self.found: list[Operation] = []

    def matmul(self, name: str, m: int, n: int, k: int, count: int, dtype: Dtype | None = None) -> None:
        dtype = dtype or self.way.spec.dtype
        low = 4 if dtype == "float32" else 2
        read, written = low * (k * (m + n) + m * n), low * m * n
        self.found.append(
            Operation(name, "matmul", self.part, count, (m, n, k), dtype, 2 * m * n * k, read, written)
        )  # fmt: skip

    def traffic(self, name: str, kind: Kind, elements: int, read: float, written: float, count: int = 1) -> None:
        moved = round(read * elements), round(written * elements)
        self.found.append(Operation(name, kind, self.part, count, (elements,), self.way.spec.dtype, 0, *moved))


def flops(operations: list[Operation], *, causal: bool = False) -> int:
    return sum(op.runs * (op.causal_flops if causal else op.flops) for op in operations)


# Kernels' own temporaries are memory, but not bytes that they move.
NOTHING = dict.fromkeys(("kept", "flash", "split", "sums1", "sums2", "sums3", "sums4"), 0)


def micro_batch(way: MicroBatchRun, make: Make | None = None, attention: str = "") -> list[Operation]:
    """Return both passes (in training) of a micro-batch; `make`, `attention`: where not the recipe's and device's."""
    if make is not None or attention:
        return _micro_batch(way, make, attention)
    if "micro_batch" not in way.found:
        way.found["micro_batch"] = _micro_batch(way, None, "")
    return way.found["micro_batch"]


def _micro_batch(way: MicroBatchRun, make: Make | None, attention: str) -> list[Operation]:
    config = way.config
    symbols = letters_of(config, *way.batch) | NOTHING
    kind: Any = attention or way.attention
    variant = replace(way.spec.variant, attention=kind, evaluation_attention=kind, pieces=False, auto_chunker=False)
    sizes = _Sizes(symbols)
    low = bfloat16 if way.spec.half else None
    program = EagerProgram(Timeline(symbols, 1), variant, config, low, way.spec.matmul, make)
    fuse = _fuse(1 if way.torch.online_softmax else 2, way.torch.fuses_attention) if way.compiled else None
    found = [_operation(launch, runs, way, sizes) for launch, runs in program.launches(way.train, fuse)]
    return list(_compiled(found, way, config.vocab_size)) if way.compiled else found


@cache
def _fuse(softmax_reads: int, attention: bool) -> Fuse:
    return partial(fused, softmax_reads=softmax_reads, alone="" if attention else "attention")


def _compiled(operations: list[Operation], way: MicroBatchRun, vocabulary: int) -> Iterator[Operation]:
    """Yield Inductor's additions: padded matmuls copy the logits' gradient; nanoGPT's returned logits get zeros."""
    for op in operations:
        if not op.flops:
            factor = way.torch.compiled_bytes if way.torch.fuses_attention or op.name != "attention" else 1.0
            read, written = round(op.read_bytes * factor), round(op.written_bytes * factor)
            if op.kind == "join" and way.spec.cuda:  # a kernel of its own, as fast as those that it fuses
                op = op._replace(kind="fused")
            if way.spec.step == "nanogpt" and op.kind == "softmax_backward" and op.name == "loss":
                logits = op.written_bytes
                yield op._replace(kind="fill", read_bytes=0, written_bytes=round(logits * factor))
                read += round(logits * factor)
            yield op._replace(read_bytes=read, written_bytes=written)
        elif op.name == "head" and way.torch.pads_matmuls and any(size % 8 for size in op.shape):
            yield op._replace(shape=tuple(size + -size % 8 for size in op.shape))
            if op.kind != "matmul":
                logits = vocabulary * op.shape[2 if op.kind == "matmul_weight" else 0]
                nbytes = way.low * logits
                yield op._replace(kind="fused", shape=(logits,), flops=0, read_bytes=nbytes, written_bytes=nbytes)
        else:
            yield op


class _Sizes(dict[tuple[Any, ...], int]):
    def __init__(self, symbols: dict[str, int]) -> None:
        super().__init__()
        self.symbols = symbols

    def __missing__(self, factors: tuple[Any, ...]) -> int:
        found = self[factors] = factors[0] * math.prod(self.symbols[letter] for letter in factors[1:])
        return found


def _operation(launch: Launch, runs: int, way: MicroBatchRun, sizes: _Sizes) -> Operation:
    product = sizes.__getitem__
    shape = tuple(map(product, launch.shape))
    arithmetic: MatmulMode = "dtype"
    if len(shape) == 3 and (way.spec.matmul not in EIGHT_BITS or launch.item_bytes == 1):
        arithmetic = way.spec.matmul
    read, written = (sum(map(product, tensors)) for tensors in (launch.reads, launch.writes))
    return Operation(
        launch.name, launch.kind, launch.part, runs, shape, way.spec.dtype, flops_of(launch.kind, shape), read, written,
        arithmetic,
    )  # fmt: skip


def flops_of(kind: str, shape: tuple[int, ...]) -> int:
    """Return the FLOPs of a matmul (three sides) or of an attention (four)."""
    if len(shape) == 3:
        return 2 * math.prod(shape)
    if len(shape) == 4:
        return (10 if kind.endswith("backward") else 4) * math.prod(shape) * shape[2]
    return 0


FUSED_LAUNCHES = 40
# Of a parameter updated in the backward pass; tests/model/test_in_backward.py counts a real step's.
UPDATE_LAUNCHES = 8
# torch.optim.AdamW by lists of tensors (foreach), each of its nine kernels reading and writing whole tensors: decay,
# two moments in two kernels each, square root, bias correction, eps, addcdiv.
FOREACH_BYTES, FOREACH_LAUNCHES = (56.0, 36.0), 9


def accumulation(way: MicroBatchRun) -> list[Operation]:
    """Return what a later micro-batch adds: each gradient is added to `.grad`, fp32; on the host beside other work."""
    ops = OperationList(way, "accumulate")
    for numel, count in [] if way.config.gradient_offload else _tensors(way):
        ops.traffic("gradients", "accumulate", numel, 8, 4, count)
    return ops.found


def _tensors(way: MicroBatchRun) -> list[tuple[int, int]]:
    return list(ModelShape.of(way.config).numels.items())


def _elementwise(way: MicroBatchRun) -> list[tuple[int, int]]:
    return _beside(ModelShape.of(way.config), way.config.optimizer)


@lru_cache(maxsize=256)
def _beside(shape: ModelShape, optimizer: str) -> list[tuple[int, int]]:
    """Return (elements, how many) of a model's parameters that an optimizer of this name leaves to AdamW."""
    if type(OPTIMIZERS[optimizer]).takes is Optimizer.takes:  # of AdamW itself, and what differs in its states alone
        return list(shape.numels.items())
    taken = OPTIMIZERS[optimizer].takes
    return list(Counter(p.numel for p in shape.parameters() if not taken(p.name, p.shape)).items())


def optimizer(way: MicroBatchRun) -> list[Operation]:
    """List unscaling (fp16), clipping and AdamW. Fused, it reads weight, gradient and two moments and writes three."""
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


def _half(way: MicroBatchRun) -> Dtype:
    """Return the dtype of an optimizer's matmuls: half precision where the device has it."""
    if way.spec.cuda:
        return way.spec.dtype if way.spec.half else "float16"  # as fast as bf16, and older cards have it too
    return "bfloat16" if cpu_has_bf16() else "float32"


def optimizer_launches(way: MicroBatchRun) -> int:
    """Count the kernels of the optimizer step: foreach and fused ones take many tensors, 8-bit AdamW chunks."""
    if way.spec.cuda and not way.torch.fused_adamw:  # torch 1.13 goes from tensor to tensor
        return FUSED_LAUNCHES + FOREACH_LAUNCHES * tensor_count(way)
    if way.spec.updates_in_backward:
        return UPDATE_LAUNCHES * tensor_count(way)
    return FUSED_LAUNCHES + sum(count * optimizer_of(way.config).launches(numel) for numel, count in _tensors(way))


def tensor_count(way: MicroBatchRun) -> int:
    return sum(count for _, count in _tensors(way))


def step(way: MicroBatchRun) -> list[Operation]:
    n = way.config.gradient_accumulation_steps
    micro = [op._replace(runs=op.runs * n) for op in micro_batch(way)]
    sums = [op._replace(runs=op.runs * (n - 1)) for op in accumulation(way)] if n > 1 else []
    return micro + sums + optimizer(way)
