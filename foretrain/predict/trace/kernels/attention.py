"""The card's attention kernel (predict/estimate/sdpa.py), and what is made before it: masks, grouped heads
(aten/src/ATen/native/transformers/attention.cpp)."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.predict.estimate.sdpa import USUAL, WITH_CUDNN, Call, kernel, prefers_cudnn
from foretrain.predict.trace.card.torch_cuda import Card

aten = torch.ops.aten
NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend
MASK_ALIGNMENT = 8  # elements, of a mask that the efficient kernel reads


class AttentionCall(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False

    @property
    def call(self) -> Call:
        three = (self.query, self.key, self.value)
        strict = torch.are_deterministic_algorithms_enabled()
        in_heads = all(t.dim() == 4 for t in three)
        # check_last_dim_stride_equals_1_dense, of the mask too
        rows = all(t.stride(-1) == 1 for t in (*three, *([] if self.mask is None else [self.mask])))
        return Call(
            dtype=str(self.query.dtype).removeprefix("torch."),
            widths=tuple(t.shape[-1] for t in three),  # type: ignore[arg-type]
            lengths=(self.query.shape[-2], self.key.shape[-2]),
            heads=tuple(t.shape[1] for t in three) if in_heads else (1, 1, 1),  # type: ignore[arg-type]
            dense=in_heads and rows,
            masked=self.mask is not None,
            dropout=self.dropout,
            causal=self.causal,
            grouped=self.grouped,
            learns=any(t.requires_grad for t in three),
            strict=strict and not torch.is_deterministic_algorithms_warn_only_enabled(),
        )


def cudnn_is_new_enough() -> bool:
    """Return whether the wheel's cuDNN has preferred attention, 9.15.1: assumed of CUDA 13's alone."""
    return torch.version.cuda is None or int(torch.version.cuda.split(".")[0]) >= 13


def kind(card: Card, asked: AttentionCall) -> str:
    """Return cudnn, flash, efficient or math. Raises RuntimeError, as PyTorch does, where no allowed one can."""
    found = kernel(card.capability, asked.call, [name for name in _order(card) if _enabled(name)])
    if found is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return found


def _order(card: Card) -> Sequence[str]:
    """Return the order of torch.nn.attention.sdpa_kernel(…, set_priority=True); else the card's."""
    order = [NAMES[i] for i in torch._C._get_sdp_priority_order() if i in NAMES]
    refused = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or not cudnn_is_new_enough()
    return WITH_CUDNN if order == list(USUAL) and prefers_cudnn(card.capability) and not refused else order


def _enabled(name: str) -> bool:
    cuda = torch.backends.cuda
    asked = {
        "cudnn": cuda.cudnn_sdp_enabled, "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled, "math": cuda.math_sdp_enabled,
    }  # fmt: skip
    return asked[name]()


class Attention:
    """The composite op as the card would run it, after autocast's casts."""

    def __init__(self, card: Card, notes: set[str]) -> None:
        self.card, self.notes = card, notes
        self.seen: set[str] = set()
        self.masking = False  # within the math path, which adds its mask in place for plain tensors

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        taken = kind(self.card, AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa))
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
    """convert_boolean_attn_mask: the term added to the scores, in their dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _readable(mask: Tensor) -> Tensor:
    """preprocess_mask: rows aligned for the kernel, by a copy where they are not."""
    aligned = all(stride % MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    if aligned:
        return mask
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, MASK_ALIGNMENT - columns % MASK_ALIGNMENT))[..., :columns]
