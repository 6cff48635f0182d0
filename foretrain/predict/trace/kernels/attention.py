"""The attention kernel that the card takes, out of those that the code allows, and what is made on the way to it.

aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (which kernel) and .../attention.cpp (masks, grouped heads).
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.predict.trace.card.torch_cuda import Card

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend
USUAL = ["flash", "efficient", "math", "cudnn"]
MASK_ALIGNMENT = 8  # elements, of a mask that the efficient kernel reads


class Asked(NamedTuple):
    """A call of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False

    @property
    def learns(self) -> bool:
        return any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def is_dense(self) -> bool:
        return all(t.dim() == 4 for t in (self.query, self.key, self.value))

    @property
    def same_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]


def cudnn_is_new_enough() -> bool:
    """Whether the wheel has a cuDNN whose attention is preferred, 9.15.1: those of CUDA 13 have; none is assumed to be
    one of these."""
    return torch.version.cuda is None or int(torch.version.cuda.split(".")[0]) >= 13


def kind(card: Card, asked: Asked) -> str:
    """cudnn, flash, efficient or math. Raises RuntimeError, as PyTorch does, where the code allows none that can."""
    for name in _order(card):
        if _enabled(name) and USABLE[name](card, asked):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(card: Card) -> list[str]:
    """As torch.nn.attention.sdpa_kernel(…, set_priority=True) says; else by the card."""
    order = [NAMES[i] for i in torch._C._get_sdp_priority_order() if i in NAMES]
    if order == USUAL and _prefers_cudnn(card):
        return ["cudnn", "flash", "efficient", "math"]
    return order


def _prefers_cudnn(card: Card) -> bool:
    """check_prefer_cudnn_attention: data-centre Hopper and Blackwell."""
    refused = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return card.capability[0] in (9, 10) and cudnn_is_new_enough() and not refused


def _enabled(name: str) -> bool:
    cuda = torch.backends.cuda
    asked = {
        "cudnn": cuda.cudnn_sdp_enabled, "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled, "math": cuda.math_sdp_enabled,
    }  # fmt: skip
    return asked[name]()


def _heads_fit(asked: Asked) -> bool:
    """Flash and cuDNN take fewer key heads as they are, when they are told to."""
    q, k, v = asked.query.shape[1], asked.key.shape[1], asked.value.shape[1]
    return asked.same_heads or (asked.grouped and k == v and q % k == 0)


def _cudnn(card: Card, asked: Asked) -> bool:
    width, widths = asked.query.shape[-1], (asked.query.shape[-1], asked.value.shape[-1])
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return (
        asked.is_dense
        and card.capability >= (8, 0)
        and asked.query.dtype in HALF
        and _heads_fit(asked)
        and max(widths) <= 128
        and all(width % 8 == 0 for width in widths)
        and asked.key.shape[-1] == width
        and asked.key.shape[-2] != 1
        and not strict
    )


def _flash(card: Card, asked: Asked) -> bool:
    width = asked.query.shape[-1]
    same = asked.key.shape[-1] == asked.value.shape[-1] == width
    square = not asked.causal or asked.query.shape[-2] == asked.key.shape[-2]
    return (
        asked.is_dense
        and asked.mask is None
        and asked.query.dtype in HALF
        and card.capability >= (8, 0)
        and _heads_fit(asked)
        and same
        and width <= 256
        and square
        and not (asked.learns and _too_wide_to_learn(card, width, asked.dropout))
    )


def _too_wide_to_learn(card: Card, width: int, dropout: float) -> bool:
    """The backward kernel of such heads does not fit the shared memory of these cards."""
    small = (8, 6) <= card.capability <= (8, 9) or (12, 0) <= card.capability <= (12, 1)
    return small and (192 < width <= 224 or (width > 224 and dropout > 0))


def _efficient(card: Card, asked: Asked) -> bool:
    half = asked.query.dtype in HALF
    dtypes = (*HALF, torch.float32) if card.capability >= (8, 0) else (torch.float16, torch.float32)
    alignment = _alignment(card, half)
    return (
        asked.is_dense
        and asked.query.dtype in dtypes
        and asked.same_heads
        and asked.key.shape[-1] == asked.query.shape[-1]
        and asked.query.shape[-1] % alignment == 0
        and asked.value.shape[-1] % alignment == 0
    )


def _alignment(card: Card, half: bool) -> int:
    """minimum_gemm_alignment, in elements."""
    tensor_cores = card.capability >= (8, 0) or (half and card.capability >= (7, 0))
    smallest = 4 if card.capability >= (8, 0) else 1
    return max(smallest, 128 // (16 if half else 32)) if tensor_cores else smallest


USABLE: dict[str, Callable[[Card, Asked], bool]] = {
    "cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": lambda card, asked: True,
}  # fmt: skip


class Attention:
    """The composite op as the card would run it; autocast has cast already when the dispatcher comes here."""

    def __init__(self, card: Card, notes: set[str]) -> None:
        self.card, self.notes = card, notes
        self.seen: set[str] = set()
        self.masking = False  # within the math path, which adds its mask in place where no mode is

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        taken = kind(self.card, Asked(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa))
        self.seen.add(taken)
        mask = _added(attn_mask, query.dtype)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        learning = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if taken == "flash":
            return _flash_out(query, key, value, dropout_p, is_causal, factor)
        if taken == "cudnn":
            if torch.version.cuda is None and self.card.capability[0] in (9, 10):
                self.notes.add("attention by cuDNN is that of a CUDA 13 wheel: one of CUDA 12 takes flash")
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, learning, dropout_p, is_causal, False, scale=factor
            )[0]
        if taken == "efficient":
            if mask is not None:
                mask = _readable(mask).expand(*query.shape[:-1], key.shape[-2])
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, learning, dropout_p, is_causal, scale=factor
            )[0]
        with self._masking():
            return aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=factor, enable_gqa=enable_gqa
            )[0]

    @contextlib.contextmanager
    def _masking(self) -> Iterator[None]:
        before, self.masking = self.masking, True
        try:
            yield
        finally:
            self.masking = before


def _flash_out(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, factor: float) -> Tensor:
    width = query.shape[-1]
    if pad := -width % 8:
        query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
    out: Any = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=factor)
    return out[0][..., :width] if pad else out[0]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """convert_boolean_attn_mask: what is added to the scores, in their dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _readable(mask: Tensor) -> Tensor:
    """preprocess_mask: rows that start where the kernel can read them, in a copy where they do not."""
    aligned = all(stride % MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    if aligned:
        return mask
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, MASK_ALIGNMENT - columns % MASK_ALIGNMENT))[..., :columns]
