"""Which kernel scaled_dot_product_attention takes, from the card, the dtype and a head's width alone. No torch.

aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, its order and its filters, for causal attention without a mask.
The path called math is no kernel: it writes the scores out, B x H x T x T of them, where the others keep B x H x T.
"""

from typing import Literal

from foretrain.hardware.catalogue import Dtype, Gpu

AttentionKind = Literal["cudnn", "flash", "efficient", "math", "bmm"]


def attention_kind(
    gpu: Gpu, dtype: Dtype, head_width: int, dropout: float, products: bool = False, *, learns: bool = True
) -> AttentionKind:
    """The kernel for heads of this width; `dropout` is that of attention, which evaluation does not have.

    `learns`: whether there is a backward pass. `products`: the option asks for batched matmuls, which a CPU does
    without dropout (model/attention.py).
    """
    if gpu.kind == "cpu" and products and not dropout:
        return "bmm"
    if gpu.kind == "cpu":
        return "math" if dropout else "flash"
    if gpu.kind != "cuda":
        return "efficient"
    half, card = dtype != "float32", gpu.capability
    if half and card >= (8, 0):
        # Data-centre Hopper and Blackwell prefer cuDNN, from its version 9.15.1 on (CUDA 13 wheels).
        if card[0] in (9, 10) and head_width <= 128 and head_width % 8 == 0:
            return "cudnn"
        # The backward pass of such heads does not fit the shared memory of sm_86 to 89 and 12x.
        small = (8, 6) <= card <= (8, 9) or (12, 0) <= card <= (12, 1)
        too_wide = 192 < head_width <= 224 or (head_width > 224 and dropout)
        if head_width <= 256 and not (learns and small and too_wide):
            return "flash"
    if dtype == "bfloat16" and card < (8, 0):
        return "math"
    return "efficient" if head_width % _alignment(card, half) == 0 else "math"


def _alignment(card: tuple[int, int], half: bool) -> int:
    """minimum_gemm_alignment of the same file, in elements: what the memory-efficient kernel asks of a head's width."""
    if card >= (8, 0):
        return 8 if half else 4
    return 8 if half and card >= (7, 0) else 1
