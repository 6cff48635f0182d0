"""Which kernel of PyTorch's computes the attention of a fine-tuning run. No torch."""

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.estimate.sdpa import USUAL, WITH_CUDNN, Call, kernel, prefers_cudnn
from foretrain.predict.finetune.program import widens

AMPERE = (8, 0)  # the first capability that FlashAttention 2 runs on (flash-attn csrc/flash_attn/flash_api.cpp)


def has_flash_2(gpu: Gpu) -> bool:
    """Whether the flash-attn package runs on a device; on a CPU its kernel is planned as PyTorch's own."""
    return gpu.kind != "cuda" or gpu.capability >= AMPERE


def attention_kernel(facts: ModelFacts, tune: FineTune, gpu: Gpu, *, learns: bool) -> str:
    """The kernel of causal attention without a mask."""
    if tune.attn == "flash_attention_2":
        return "flash"
    if gpu.kind != "cuda":  # sdp_utils_cpp.cpp: without dropout, and with any mask
        return "math" if learns and facts.attention_dropout else "flash"
    # Without autocast all that is not in 4 bits is fp32, and so is what it makes.
    wide = widens(tune) and tune.loop != "axolotl"
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(tune.amp, "float32" if wide else tune.dtype)
    width, heads = facts.head_dim, (facts.n_head, facts.n_kv_head, facts.n_kv_head)
    call = Call(half, (width, width, width), (2, 2), heads, grouped=facts.groups > 1, learns=learns,
                dropout=facts.attention_dropout if learns else 0.0)  # fmt: skip
    return kernel(gpu.capability, call, WITH_CUDNN if prefers_cudnn(gpu.capability) else USUAL) or "math"
