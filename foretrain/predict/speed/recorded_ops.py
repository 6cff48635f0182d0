"""The operations of an eager micro-batch: the kernels that the model's own code runs (predict/abstract). No torch."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from foretrain.config.precision import EIGHT_BITS
from foretrain.hardware.catalogue import MatmulMode
from foretrain.predict.abstract.fusion import fused
from foretrain.predict.abstract.kernels import Launch
from foretrain.predict.abstract.step import EagerProgram, Fuse, Make
from foretrain.predict.abstract.tensors import bfloat16
from foretrain.predict.spec import letters_of
from foretrain.predict.speed.ops import Operation, Way
from foretrain.predict.timeline import Timeline

# What kernels take for themselves is memory, and no bytes that they move.
NOTHING = dict.fromkeys(("kept", "flash", "split", "sums1", "sums2", "sums3", "sums4"), 0)


def micro_batch(way: Way, make: Make | None = None, attention: str = "") -> list[Operation]:
    """Forward and, in training, backward pass of a micro-batch; `make`, `attention`: where they are not the recipe's
    and the device's."""
    if make is not None or attention:
        return _micro_batch(way, make, attention)
    if "micro_batch" not in way.found:
        way.found["micro_batch"] = _micro_batch(way, None, "")
    return way.found["micro_batch"]


def _micro_batch(way: Way, make: Make | None, attention: str) -> list[Operation]:
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


def _compiled(operations: list[Operation], way: Way, vocabulary: int) -> Iterator[Operation]:
    """What Inductor does besides. It pads matmuls of the head whose sizes are not multiples of 8: the gradient of the
    logits is copied, a weight's copy is small, a result is only sliced. nanoGPT's logits are returned, so their
    gradient of zeros is written and read."""
    for op in operations:
        if not op.flops:
            factor = way.torch.compiled_bytes if way.torch.fuses_attention or op.name != "attention" else 1.0
            read, written = round(op.read_bytes * factor), round(op.written_bytes * factor)
            if op.kind == "join" and way.spec.cuda:  # a kernel of its own, as quick as those that it fuses
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
    """What (coefficient, letters …) come to."""

    def __init__(self, symbols: dict[str, int]) -> None:
        super().__init__()
        self.symbols = symbols

    def __missing__(self, factors: tuple[Any, ...]) -> int:
        found = self[factors] = factors[0] * math.prod(self.symbols[letter] for letter in factors[1:])
        return found


def _operation(launch: Launch, runs: int, way: Way, sizes: _Sizes) -> Operation:
    product = sizes.__getitem__
    shape = tuple(map(product, launch.shape))
    arithmetic: MatmulMode = "dtype"
    if len(shape) == 3 and (way.spec.matmul not in EIGHT_BITS or launch.item_bytes == 1):
        arithmetic = way.spec.matmul
    read, written = (sum(map(product, tensors)) for tensors in (launch.reads, launch.writes))
    return Operation(
        launch.name, launch.kind, launch.part, runs, shape, way.spec.dtype, _flops(launch.kind, shape), read, written,
        arithmetic,
    )  # fmt: skip


def _flops(kind: str, shape: tuple[int, ...]) -> int:
    if len(shape) == 3:
        return 2 * math.prod(shape)
    if len(shape) == 4:
        return (10 if kind.endswith("backward") else 4) * math.prod(shape) * shape[2]
    return 0
