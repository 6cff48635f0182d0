"""Which kernel scaled_dot_product_attention takes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). No torch. The
path called math writes the B x H x T x T scores out."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from foretrain.hardware.catalogue import Dtype, Gpu

AttentionKind = Literal["cudnn", "flash", "efficient", "math", "bmm"]
Capability = tuple[int, int]
USUAL = ("flash", "efficient", "math", "cudnn")
WITH_CUDNN = ("cudnn", "flash", "efficient", "math")


class Call(NamedTuple):
    """A call, of queries, keys, values. `dense`: the last dimension is in one piece; `strict`: deterministic only."""

    dtype: str
    widths: tuple[int, int, int]
    lengths: tuple[int, int]  # of queries and keys
    heads: tuple[int, int, int] = (1, 1, 1)
    dense: bool = True
    masked: bool = False
    dropout: float = 0.0
    causal: bool = True
    grouped: bool = False
    learns: bool = True
    strict: bool = False

    @property
    def half(self) -> bool:
        return self.dtype in ("float16", "bfloat16")

    @property
    def same_heads(self) -> bool:
        return self.heads[0] == self.heads[1] == self.heads[2]  # sizes of a trace may be symbols, without a hash

    @property
    def heads_fit(self) -> bool:
        """Flash and cuDNN take fewer key heads as they are, when asked to."""
        q, k, v = self.heads
        return self.same_heads or (self.grouped and k == v and q % k == 0)


def prefers_cudnn(capability: Capability) -> bool:
    """Data-centre Hopper and Blackwell do, from cuDNN 9.15.1 on (CUDA 13 wheels); check_prefer_cudnn_attention."""
    return capability[0] in (9, 10)


def _cudnn(card: Capability, call: Call) -> bool:
    q, k, v = call.widths
    return (
        call.dense
        and card >= (8, 0)
        and call.half
        and call.heads_fit
        and max(q, v) <= 128
        and q % 8 == v % 8 == 0
        and k == q
        and call.lengths[1] != 1
        and not call.strict
    )


def _flash(card: Capability, call: Call) -> bool:
    width = call.widths[0]
    return (
        call.dense
        and not call.masked
        and call.half
        and card >= (8, 0)
        and call.heads_fit
        and call.widths[0] == call.widths[1] == call.widths[2]
        and width <= 256
        and (not call.causal or call.lengths[0] == call.lengths[1])
        and not (call.learns and _too_wide_to_learn(card, width, call.dropout))
    )


def _too_wide_to_learn(card: Capability, width: int, dropout: float) -> bool:
    """The backward kernel of such heads does not fit the shared memory of these cards."""
    small = (8, 6) <= card <= (8, 9) or (12, 0) <= card <= (12, 1)
    return small and (192 < width <= 224 or (width > 224 and dropout > 0))


def _efficient(card: Capability, call: Call) -> bool:
    q, k, v = call.widths
    dtypes = ("float16", "bfloat16", "float32") if card >= (8, 0) else ("float16", "float32")
    alignment = _alignment(card, call.half)
    aligned = q % alignment == v % alignment == 0
    return call.dense and call.dtype in dtypes and call.same_heads and k == q and aligned


def _alignment(card: Capability, half: bool) -> int:
    """minimum_gemm_alignment of the same file, in elements: what the memory-efficient kernel asks of a head's width."""
    if card >= (8, 0):
        return 8 if half else 4
    return 8 if half and card >= (7, 0) else 1


USABLE: dict[str, Callable[[Capability, Call], bool]] = {
    "cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": lambda card, call: True,
}  # fmt: skip


def kernel(card: Capability, call: Call, order: Sequence[str]) -> str | None:
    """The first kernel of an order that can carry out a call on a card; None where none can."""
    return next((name for name in order if USABLE[name](card, call)), None)


def attention_kind(
    gpu: Gpu, dtype: Dtype, head_width: int, dropout: float, matmuls: bool = False, *, learns: bool = True
) -> AttentionKind:
    """Return the kernel of causal attention; `products`: batched matmuls (model/attention.py)."""
    if gpu.kind == "cpu" and matmuls and not dropout:
        return "bmm"
    if gpu.kind == "cpu":
        return "math" if dropout else "flash"
    if gpu.kind == "mps":  # no fused kernel of it goes backward (github.com/pytorch/pytorch/issues/179294)
        return "math"
    call = Call(dtype, (head_width, head_width, head_width), (2, 2), dropout=dropout, learns=learns)
    order = WITH_CUDNN if prefers_cudnn(gpu.capability) else USUAL
    return kernel(gpu.capability, call, order)  # type: ignore[return-value]  # math can always
