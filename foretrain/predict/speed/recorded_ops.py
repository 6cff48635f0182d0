"""The operations of an eager micro-batch: the kernels that the model's own code runs (predict/abstract). No torch."""

import math
from typing import Any

from foretrain.config.precision import EIGHT_BITS
from foretrain.hardware.catalogue import MatmulMode
from foretrain.model.shape import ModelShape
from foretrain.predict.abstract.kernels import Launch
from foretrain.predict.abstract.step import EagerProgram, Make
from foretrain.predict.abstract.tensors import bfloat16
from foretrain.predict.speed.ops import Operation, Way
from foretrain.predict.timeline import Timeline, Variant

# What kernels take for themselves is memory, and no bytes that they move.
NOTHING = dict.fromkeys(("kept", "flash", "split", "sums1", "sums2", "sums3", "sums4"), 0)


def recorded(way: Way, make: Make | None = None) -> list[Operation]:
    """Forward and, in training, backward pass of a micro-batch; `make`: of a model other than the recipe's."""
    own, (batch, block), shape = way.own, way.batch, ModelShape.of(way.config)
    padded = -(-shape.head_dim // 8) * 8
    symbols = {
        "B": batch, "T": block, "C": shape.n_embd, "H": shape.n_head, "V": shape.vocab_size, "W": shape.block_size,
        "D": shape.head_dim, "E": padded, "A": shape.n_head * padded, "n": min(own.loss_chunk_size, batch * block),
        "K": shape.n_kv_head, "G": shape.n_head // shape.n_kv_head,
        **{letter: getattr(own, name) for name, letter in shape.family.letters.items()}, **NOTHING,
    }  # fmt: skip
    variant = Variant(
        half=way.half, cuda=way.cuda, keeps_logits=way.step == "nanogpt", checkpointed=own.checkpointed,
        dropout=own.dropout > 0, bias=own.bias, chunked=own.loss_chunk_size > 0, master=own.master_weights,
        cheap=own.recompute_norm_gelu, attention=way.attention, evaluation_attention=way.attention,
    )  # fmt: skip
    sizes = _Sizes(symbols)
    program = EagerProgram(Timeline(symbols, 1), variant, own, bfloat16 if way.half else None, way.matmul, make)
    return [_operation(launch, runs, way, sizes) for launch, runs in program.launches(way.train)]


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
    if len(shape) == 3 and (way.matmul not in EIGHT_BITS or launch.item_bytes == 1):
        arithmetic = way.matmul
    read, written = (sum(map(product, tensors)) for tensors in (launch.reads, launch.writes))
    return Operation(
        launch.name, launch.kind, launch.part, runs, shape, way.dtype, _flops(launch.kind, shape), read, written,
        arithmetic,
    )  # fmt: skip


def _flops(kind: str, shape: tuple[int, ...]) -> int:
    if len(shape) == 3:
        return 2 * math.prod(shape)
    if len(shape) == 4:
        return (10 if kind.endswith("backward") else 4) * math.prod(shape) * shape[2]
    return 0
