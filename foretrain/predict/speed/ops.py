"""A training step as a list of operations: FLOPs, bytes read and written, shape and dtype of each. No torch.

FLOP convention: a multiply-add is two; attention counts the full T x T square forward (4·B·T²·C) and two and a half
times that backward, as torch.utils.flop_counter does, so sums equal FlopCounterMode's. Flash attention really does
the causal half: `causal_flops`. Only matrix products and attention count FLOPs, as there; all else is bytes.

Bytes are those of the kernels that PyTorch runs (aten native kernels eager; Inductor's fusions compiled), each tensor
read or written once per kernel; caches are the rates' business (rates.py). Letters as in model/shape.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from foretrain.config.options import RunConfig
from foretrain.config.precision import EIGHT_BITS
from foretrain.hardware.catalogue import Dtype, MatmulMode
from foretrain.model.shape import ModelShape
from foretrain.predict.software import ASSUMED, Software
from foretrain.predict.speed import low_precision_ops

Kind = Literal[
    "matmul", "matmul_input", "matmul_weight",  # x·Wᵀ, and backward: dy·W and dyᵀ·x
    "attention", "attention_backward", "attention_bmm", "attention_bmm_backward",
    "norm", "norm_backward", "gelu", "gelu_backward",
    "softmax", "softmax_backward", "fill", "gather", "scatter",
    "cast", "add", "join", "dropout", "accumulate", "fused", "adamw", "clip", "gradient_norm",
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
    """How a micro-batch is run: whose step, on what, in which mode."""

    config: RunConfig
    dtype: Dtype
    step: Literal["foretrain", "nanogpt"]
    compiled: bool
    train: bool
    cuda: bool
    torch: Software = ASSUMED

    @property
    def written_attention(self) -> bool:
        """Does the model write attention out, as nanoGPT does where torch has no kernel for it?"""
        return not self.torch.fused_attention

    @property
    def attention(self) -> Any:
        """The kernel of eager attention; nanoGPT writes it out where torch has none, and a CPU where it drops."""
        if self.written_attention:
            return "written"
        return "math" if not self.cuda and self.config.dropout and self.train else "flash"

    @property
    def batch(self) -> tuple[int, int]:
        """(sequences, context) of a micro-batch; nanoGPT has no evaluation sizes of its own."""
        c = self.config
        if self.train or self.step == "nanogpt":
            return c.batch_size, c.block_size
        return c.eval_batch, c.eval_block

    @property
    def matmul(self) -> MatmulMode:
        """The arithmetic of products; nanoGPT has no such knob."""
        return self.own.matmul

    @property
    def eight_bits(self) -> bool:
        """Are the blocks' linear layers those of model/low_precision.py?"""
        return self.matmul in EIGHT_BITS

    @property
    def products_attention(self) -> bool:
        """Is attention done by batched products (model/attention.py)?"""
        c = self.own
        return not self.cuda and c.attention == "bmm" and c.recipe == "nanogpt" and not (self.train and c.dropout)

    @property
    def half(self) -> bool:
        return self.dtype != "float32"

    @property
    def low(self) -> int:
        """Bytes of an element in a matrix product."""
        return 2 if self.half else 4

    @cached_property
    def own(self) -> RunConfig:
        """The config as this step has it: nanoGPT has none of foretrain's own ways."""
        return self.config if self.step == "foretrain" else self.config.as_nanogpt()

    @property
    def casts(self) -> bool:
        """Whether autocast makes half precision of fp32."""
        return self.half and not self.own.master_weights

    @property
    def wide(self) -> int:
        """Bytes of an element of the residual stream."""
        return 2 if self.half and self.own.master_weights else 4

    @property
    def checkpointed(self) -> int:
        """Blocks whose forward pass runs again in the backward pass."""
        return self.own.checkpointed if self.train else 0

    @property
    def cheap_blocks(self) -> int:
        """Blocks of which norms and GELU run again."""
        again = self.train and self.own.recompute_norm_gelu
        return self.config.n_layer - self.checkpointed if again else 0

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at one time."""
        tokens = self.batch[0] * self.batch[1]
        return min(self.own.loss_chunk_size or tokens, tokens)


class OperationList:
    """Collects operations; `compiled_ops.py` writes the passes of a compiled step."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.shape = ModelShape.of(way.config)
        self.batch, self.block = way.batch
        self.tokens = self.batch * self.block
        self.elements = self.tokens * self.shape.n_embd
        self.part: Part = "forward"
        self.found: list[Operation] = []

    def matmul(self, name: str, kind: Kind, m: int, n: int, k: int, count: int = 1) -> None:
        """An m x k by k x n product in the step's dtype; a weight's gradient of half factors is cast by its caller."""
        low = self.way.low
        arithmetic: MatmulMode = "fp16_accumulation" if self.way.matmul == "fp16_accumulation" else "dtype"
        self.found.append(
            Operation(
                name, kind, self.part, count, (m, n, k), self.way.dtype, 2 * m * n * k, low * k * (m + n), low * m * n,
                arithmetic,
            )
        )  # fmt: skip

    def eight_bit_matmul(self, name: str, kind: Kind, shape: tuple[int, int, int], count: int, out: int) -> None:
        """A product of (m, n, k) with one byte an element of its factors and `out` of its result."""
        m, n, k = shape
        self.found.append(
            Operation(
                name, kind, self.part, count, shape, self.way.dtype, 2 * m * n * k, k * (m + n), out * m * n,
                self.way.matmul,
            )
        )  # fmt: skip

    def traffic(self, name: str, kind: Kind, elements: int, read: float, written: float, count: int = 1) -> None:
        """A kernel that moves `read` and `written` bytes an element."""
        self.found.append(
            Operation(
                name, kind, self.part, count, (elements,), self.way.dtype, 0, round(read * elements),
                round(written * elements),
            )
        )  # fmt: skip

    def linear(self, name: str, wide: int, narrow: int, rows: int, count: int) -> None:
        self.matmul(name, "matmul", rows, wide, narrow, count)

    def linear_backward(self, name: str, wide: int, narrow: int, rows: int, count: int) -> None:
        self.matmul(name, "matmul_input", rows, narrow, wide, count)
        self.matmul(name, "matmul_weight", wide, narrow, rows, count)

    def attention(self, count: int, *, backward: bool = False) -> None:
        """Flash attention reads q, k, v and writes its output; backward reads five tensors and writes three."""
        C, T = self.shape.n_embd, self.block
        flops, tensor = 4 * self.batch * T * T * C, self.way.low * self.elements
        shape = (self.batch, self.shape.n_head, T, self.shape.head_dim)
        kind: Kind = "attention_backward" if backward else "attention"
        if self.way.products_attention:
            kind = "attention_bmm_backward" if backward else "attention_bmm"
        read, written = (5, 3) if backward else (3, 1)
        self.found.append(
            Operation(
                "attention", kind, self.part, count, shape, self.way.dtype,
                flops * 5 // 2 if backward else flops, read * tensor, written * tensor,
            )
        )  # fmt: skip

    def blocks_matmuls(self, *, backward: bool, count: int) -> None:
        """The four linear layers of a block; forward again, the last one's output is needed by nobody but a mask."""
        C, add = self.shape.n_embd, self.linear_backward if backward else self.linear
        first = [("qk", 2 * C, C), ("v", C, C)] if self.shape.modern else [("attn", 3 * C, C)]
        layers = [*first, ("proj", C, C), ("fc", 4 * C, C), ("out", C, 4 * C)]
        if self.part == "recompute" and not self.way.config.dropout:
            layers.pop()
        for name, wide, narrow in layers:
            if self.way.eight_bits:
                layer = low_precision_ops.Linear(
                    name, wide, narrow, self.tokens, self.way.low if name in ("proj", "out") else self.way.wide, count
                )
                (low_precision_ops.backward if backward else low_precision_ops.forward)(self, layer)
                continue
            add(name, wide, narrow, self.tokens, count)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(rows, how many chunks of so many rows) of the head."""
        whole, rest = divmod(self.tokens, self.way.chunk)
        yield self.way.chunk, whole
        if rest:
            yield rest, 1


def flops(operations: list[Operation], *, causal: bool = False) -> int:
    """FLOPs of a list; `causal`: with the half of attention's square that flash kernels compute."""
    return sum(op.runs * (op.causal_flops if causal else op.flops) for op in operations)
