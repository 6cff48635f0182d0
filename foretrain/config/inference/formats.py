"""In how many bits weights and KV caches are stored when a model generates text, by the names of those who store them.

GGUF's blocks (ggml-org/llama.cpp, ggml/src/ggml-common.h): q4_0 is 18 bytes for 32 weights, q8_0 34 for 32, q4_K 144
for 256, q5_K 176, q6_K 210. The mixtures with _m and _s keep a part of the blocks and the head in more bits. Of Llama
3.1 8B tools/quantize/README.md there says 4.8944 bits for Q4_K_M, 4.6672 for Q4_K_S, 5.7036 for Q5_K_M, 6.5633 for Q6_K
and 8.5008 for Q8_0; these rows come to that within 0.2 %. Those below four bits follow from the same table, with the
embedding and the head as src/llama-quant.cpp stores them; q3_k_m, which is not in it, from the types of its tensors.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

Engine = Literal["llama.cpp", "pytorch"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


class Format(NamedTuple):
    """Bits a number of the blocks' matrices, of the embedding and of the head; and who generates with it by default."""

    block: float
    embedding: float
    head: float
    engine: Engine
    quantized: bool = True


FORMATS: dict[str, Format] = {
    "f32": Format(32, 32, 32, "pytorch", False), "f16": Format(16, 16, 16, "pytorch", False),
    "bf16": Format(16, 16, 16, "pytorch", False), "q8_0": Format(8.5, 8.5, 8.5, "llama.cpp"),
    "q6_k": Format(6.5625, 6.5625, 6.5625, "llama.cpp"), "q5_k_m": Format(5.654, 5.5, 6.5625, "llama.cpp"),
    "q5_0": Format(5.5, 5.5, 6.5625, "llama.cpp"), "q4_k_m": Format(4.798, 4.5, 6.5625, "llama.cpp"),
    "q4_k_s": Format(4.538, 4.5, 6.5625, "llama.cpp"), "q4_0": Format(4.5, 4.5, 6.5625, "llama.cpp"),
    "iq4_xs": Format(4.317, 4.25, 6.5625, "llama.cpp"), "q3_k_l": Format(4.192, 3.4375, 6.5625, "llama.cpp"),
    "q3_k_m": Format(3.845, 3.4375, 6.5625, "llama.cpp"), "iq3_m": Format(3.577, 3.4375, 6.5625, "llama.cpp"),
    "q3_k_s": Format(3.4375, 3.4375, 6.5625, "llama.cpp"), "iq3_xxs": Format(3.072, 3.4375, 5.5, "llama.cpp"),
    "q2_k": Format(2.943, 2.625, 6.5625, "llama.cpp"), "iq2_m": Format(2.698, 3.4375, 5.5, "llama.cpp"),
    # torchao's weight-only formats leave the embedding in bf16: int8 has a scale a row, int4 a scale and a zero for 64.
    "fp8": Format(8, 16, 8, "pytorch"), "int8": Format(8, 16, 8, "pytorch"), "int4": Format(4.5, 16, 4.5, "pytorch"),
    # As repositories publish them, with the embedding and the head in 16 bits: GPTQ and AWQ have a 16-bit scale and a
    # 4-bit zero for each group, bitsandbytes' NF4 a scale of 32 for 64 weights, or one of 8 that is quantized again.
    "w8": Format(8.01, 16, 16, "pytorch"), "w4_g128": Format(4 + 20 / 128, 16, 16, "pytorch"),
    "w4_g64": Format(4 + 20 / 64, 16, 16, "pytorch"), "w4_g32": Format(4 + 20 / 32, 16, 16, "pytorch"),
    "nf4": Format(4.5, 16, 16, "pytorch"), "nf4_dq": Format(4.127, 16, 16, "pytorch"),
}  # fmt: skip
PUBLISHED = ("w8", "w4_g128", "w4_g64", "w4_g32", "nf4", "nf4_dq")
SPELLINGS = {"float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
             "q8": "q8_0", "q4": "q4_k_m", "q5": "q5_k_m", "q6": "q6_k"}  # fmt: skip
STORED = {"float32": "bf16", "bfloat16": "bf16", "float16": "f16"}  # of published weights, by their dtype
CACHES: dict[str, float] = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "q8_0": 8.5, "q4_0": 4.5}


def published_in(quantization: Mapping[str, Any]) -> str:
    """The format of a config.json's quantization_config; '' of one that is not known here."""
    method, groups = quantization.get("quant_method", "bitsandbytes"), quantization.get("config_groups")
    if method == "bitsandbytes":
        return (
            "w8"
            if quantization.get("load_in_8bit")
            else f"nf4{'_dq' * bool(quantization.get('bnb_4bit_use_double_quant'))}"
        )
    weights = quantization
    if method == "compressed-tensors" and isinstance(groups, Mapping) and len(groups) == 1:
        group = next(iter(groups.values()))
        weights = group.get("weights") if isinstance(group, Mapping) else None
    bits = 8 if method in ("fp8", "fbgemm_fp8") else None
    size: Any = 128
    if method in ("gptq", "awq", "compressed-tensors") and isinstance(weights, Mapping):
        bits = weights.get("bits", weights.get("num_bits", weights.get("w_bit")))
        size = weights.get("group_size") or weights.get("q_group_size") or 128
    if bits == 8:
        return "w8"
    size = 128 if size == -1 else size
    return f"w4_g{size}" if bits == 4 and f"w4_g{size}" in FORMATS else ""


def named(word: str) -> str:
    """Our name of a format or a KV cache's, as somebody types it: any case, - for _."""
    key = word.strip().lower().replace("-", "_")
    return SPELLINGS.get(key, key)
