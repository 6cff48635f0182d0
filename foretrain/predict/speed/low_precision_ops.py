"""What the blocks' linear layers do with `matmul = fp8` or `int8` in a compiled step: products and casts.

A product reads one byte an element. Around it each tensor is read for its largest element, scaled and cast, and what
backward multiplies is copied with the other side contiguous: Inductor makes two passes of a tensor with one scale, and
one of rows. Whether it fuses more on a card has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrain.predict.speed.ops import Kind, OperationList


@dataclass(frozen=True)
class Linear:
    """y (rows x wide) = x (rows x narrow) · W, `count` times; `width`: bytes of an element of x."""

    name: str
    wide: int
    narrow: int
    rows: int
    width: int
    count: int


def forward(ops: OperationList, layer: Linear) -> None:
    """Quantise input and weight, multiply."""
    quantise(ops, layer, layer.rows * layer.narrow, layer.width)
    quantise(ops, layer, layer.wide * layer.narrow, 4)
    product(ops, layer, "matmul", (layer.rows, layer.wide, layer.narrow), ops.way.low)


def backward(ops: OperationList, layer: Linear) -> None:
    """The input's gradient in 8 bits; the weight's in FP8, or in the dtype of the run where the mode is int8."""
    low, x, w, y = (
        ops.way.low, layer.rows * layer.narrow, layer.wide * layer.narrow, layer.rows * layer.wide,
    )  # fmt: skip
    quantise(ops, layer, y, low)
    moves(ops, layer, w, (1, 1))
    product(ops, layer, "matmul_input", (layer.rows, layer.narrow, layer.wide), layer.width)
    if ops.way.matmul == "fp8":
        moves(ops, layer, y, (1, 1))
        moves(ops, layer, x, (1, 1))
        product(ops, layer, "matmul_weight", (layer.wide, layer.narrow, layer.rows), 4)
        return
    moves(ops, layer, x, (1, low))
    ops.matmul(layer.name, "matmul_weight", layer.wide, layer.narrow, layer.rows, layer.count)
    if ops.way.half:
        moves(ops, layer, w, (low, 4))


def moves(ops: OperationList, layer: Linear, elements: int, *passes: tuple[float, float]) -> None:
    """Kernels over so many elements, each with the bytes that it reads and writes of one."""
    for read, written in passes:
        ops.traffic(layer.name, "cast", elements, read, written, layer.count)


def quantise(ops: OperationList, layer: Linear, elements: int, width: int) -> None:
    """Largest element, scaling, rounding (int8) and the cast."""
    moves(ops, layer, elements, *([(width, 1)] if ops.way.matmul == "int8" else [(width, 0), (width, 1)]))


def product(ops: OperationList, layer: Linear, kind: Kind, shape: tuple[int, int, int], out: int) -> None:
    """An 8-bit product whose result has `out` bytes an element; int8 sums are int32 and are scaled afterwards."""
    m, n, _ = shape
    int8 = ops.way.matmul == "int8"
    ops.eight_bit_matmul(layer.name, kind, shape, layer.count, 4 if int8 else out)
    if int8:
        moves(ops, layer, m * n, (4, out))
