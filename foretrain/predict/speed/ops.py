"""A training step as a list of operations: FLOPs, bytes read and written, shape and dtype of each. No torch.

FLOP convention: a multiply-add is two; attention counts the full T x T square forward (4·B·T²·C) and two and a half
times that backward, as torch.utils.flop_counter does, so sums equal FlopCounterMode's. Flash attention really does
the causal half: `causal_flops`. Only matrix products and attention count FLOPs, as there; all else is bytes.

Bytes are those of the kernels that PyTorch runs (aten native kernels eager; Inductor's fusions compiled), each tensor
read or written once per kernel; caches are the rates' business (rates.py). Letters as in model/shape.py.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, MatmulMode
from foretrain.model.shape import ModelShape
from foretrain.predict.software import ASSUMED, Software
from foretrain.predict.spec import StepSpec

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
    """`runs` kernels of one kind. `shape`: (m, n, k) of a product, (B, H, T, D) of attention, else (elements,)."""

    name: str
    kind: Kind
    part: Part
    runs: int
    shape: tuple[int, ...]
    dtype: Dtype
    flops: int  # of one
    read_bytes: int  # of one
    written_bytes: int  # of one
    arithmetic: MatmulMode = "dtype"  # of a product

    @property
    def nbytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def causal_flops(self) -> int:
        """What is really computed of it: flash attention leaves out the half above the diagonal."""
        return self.flops // 2 if self.kind.startswith("attention") else self.flops


@dataclass(frozen=True)
class Way:
    """How a micro-batch of a step is run: in training or evaluation, with which torch."""

    spec: StepSpec
    train: bool = True
    torch: Software = ASSUMED
    found: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # once it was asked for

    @property
    def config(self) -> RunConfig:
        return self.spec.config

    @property
    def compiled(self) -> bool:
        return self.spec.compiled and self.torch.compiles

    @property
    def attention(self) -> Any:
        """The kernel of eager attention; nanoGPT writes it out where torch has none, and a CPU where it drops."""
        if not self.torch.fused_attention:
            return "written"
        return "math" if not self.spec.cuda and self.config.dropout and self.train else "flash"

    @property
    def batch(self) -> tuple[int, int]:
        """(sequences, context) of a micro-batch."""
        c = self.config
        return (c.batch_size, c.block_size) if self.train else (c.eval_batch, c.eval_block)

    @property
    def products_attention(self) -> bool:
        """Is attention done by batched products (model/attention.py)?"""
        return not self.spec.cuda and self.spec.bmm_attention and not (self.train and self.config.dropout)

    @property
    def low(self) -> int:
        """Bytes of an element in a matrix product."""
        return 2 if self.spec.half else 4

    @property
    def wide(self) -> int:
        """Bytes of an element of the residual stream."""
        return self.spec.variant.wide


class OperationList:
    """Collects operations of what no model's code tells: sums of gradients, and the optimizer."""

    def __init__(self, way: Way, part: Part = "optimizer") -> None:
        self.way = way
        self.shape = ModelShape.of(way.config)
        self.part: Part = part
        self.found: list[Operation] = []

    def matmul(self, name: str, m: int, n: int, k: int, count: int, dtype: Dtype | None = None) -> None:
        """`count` products of an m x k and a k x n matrix; the sum is read, too."""
        dtype = dtype or self.way.spec.dtype
        low = 4 if dtype == "float32" else 2
        read, written = low * (k * (m + n) + m * n), low * m * n
        self.found.append(
            Operation(name, "matmul", self.part, count, (m, n, k), dtype, 2 * m * n * k, read, written)
        )  # fmt: skip

    def traffic(self, name: str, kind: Kind, elements: int, read: float, written: float, count: int = 1) -> None:
        """A kernel that moves `read` and `written` bytes an element."""
        moved = round(read * elements), round(written * elements)
        self.found.append(Operation(name, kind, self.part, count, (elements,), self.way.spec.dtype, 0, *moved))


def flops(operations: list[Operation], *, causal: bool = False) -> int:
    """FLOPs of a list; `causal`: with the half of attention's square that flash kernels compute."""
    return sum(op.runs * (op.causal_flops if causal else op.flops) for op in operations)
